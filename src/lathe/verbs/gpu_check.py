"""Check what works on this machine's GPU: run real commands, and tabulate their outcomes."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lathe.errors import did_you_mean, require
from lathe.files import write_atomically
from lathe.runs.rundir import describe_environment
from lathe.verbs.reproduce import project

# A ResNet-8 on images of CIFAR's shape; each line adds its own overrides.
COMMON = """
    data=synthetic data.channels=3 data.image_size=32 data.mean=[0.5,0.5,0.5] data.std=[0.25,0.25,0.25]
    data.source.train_size=1024 data.source.val_size=128 data.source.test_size=128 data.batch_size=128
    model=resnet20 model.net.depth=8 trainer.max_epochs=null trainer.max_steps=40 trainer.check_val_every_n_epoch=null
    trainer.val_check_interval=40 trainer.enable_progress_bar=false trainer.enable_model_summary=false
    compression.receipt=none
"""
SGD = "optimizer=sgd optimizer.lr=0.02"
TOKENS = """
    data=synthetic_tokens data.source.train_size=1024 data.source.val_size=32 data.source.test_size=32
    model=gpt_nano optimizer=adamw trainer.max_epochs=null trainer.max_steps=40 trainer.check_val_every_n_epoch=null
    trainer.val_check_interval=32 trainer.enable_progress_bar=false trainer.enable_model_summary=false
"""
# name: overrides that are added, and the number of devices
TRAINED: dict[str, tuple[str, int]] = {
    "float32": ("", 1),
    "TF32": ("precision.matmul=high", 1),
    "bf16-mixed": ("precision=bf16-mixed", 1),
    "16-mixed": ("precision=16-mixed", 1),
    "bf16-true": (f"precision=bf16-true {SGD}", 1),
    "16-true": (f"precision=16-true {SGD}", 1),
    "performance=fast": ("performance=fast", 1),
    "deterministic": ("trainer.deterministic=true", 1),
    "workers": ("data.loader=workers data.num_workers=2 data.prefetch_factor=2", 1),
    "batches ahead": ("trainer.prefetch_to_device=true data.loader=workers data.num_workers=2", 1),
    "compile": ("compile=default", 1),
    "CUDA graphs": ("compile=reduce-overhead", 1),
    "whole step": ("compile=reduce-overhead compile.scope=step", 1),
    "recomputation": ("trainer.activation_checkpointing=blocks", 1),
    "offloaded activations": ("trainer.activation_checkpointing=offload", 1),
    "fused optimizer": ("optimizer=adamw +optimizer.fused=true", 1),
    "ema": ("callbacks=[default,ema]", 1),
    "prune_nm": ("compression=prune_nm", 1),
    "qat": ("compression=qat", 1),
    "distill": ("compression=distill compression.distill.teacher=ema", 1),
    "fsdp": ("strategy=fsdp", 1),
    "deepspeed_2": ("strategy=deepspeed_2", 1),
    "deepspeed_3_offload": ("strategy=deepspeed_3_offload", 1),
    "tokens": ("precision=bf16-mixed", 1),
    "ddp": ("strategy=ddp trainer.devices=2", 2),
    "pipeline": ("strategy=pipeline trainer.devices=2", 2),
    "tensor": ("strategy=tensor trainer.devices=2", 2),
}
OF_TOKENS = ("tokens", "tensor")
# commands on the run of the first line
ON_A_RUN = {
    "evaluate on the CPU": "scripts/evaluate.py run={run} trainer.accelerator=cpu",
    "evaluate": "scripts/evaluate.py run={run} trainer.accelerator={accelerator}",
    "onnx": "scripts/export.py run={run} target=onnx",
    "aot_inductor": "scripts/export.py run={run} target=aot_inductor target.aot_inductor.device={device}",
    "tensorrt": "scripts/export.py run={run} target=tensorrt",
}


@dataclass
class Line:
    """A line of the table; `outcome` is works, refused (with an error message), failed, timed out or left out."""

    name: str
    command: str
    outcome: str = ""
    said: str = ""
    seconds: float = 0.0


def gpu_check(request: dict[str, Any]) -> int:
    """Run the lines of `request`, print and write the table; return 0 if no line failed or timed out."""
    root, names = project("gpu_check.py"), [*TRAINED, *ON_A_RUN]
    for name in request["only"] or []:
        require(name in names, f"only=[{name}]: {did_you_mean(name, names)}")
    hardware, devices = _hardware(request["accelerator"])
    folder = f"{request['paths']['log_dir']}/gpu_check/{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    output = Path(request["output"] or folder).absolute()
    output.mkdir(parents=True, exist_ok=True)
    print(f"{hardware}; a line may take {request['timeout']:g} s.", flush=True)
    lines: list[Line] = []
    run = ""  # the first run directory
    for name in request["only"] or names:
        line = Line(name, f"python {command_of(name, request, run)}")
        if name in TRAINED and TRAINED[name][1] > devices:
            line.outcome, line.said = "left out", f"takes {TRAINED[name][1]} devices, and {devices} is here"
        elif name in ON_A_RUN and not run:
            line.outcome, line.said = "left out", "no line before it has left a run"
        else:
            log_dir = output / "runs" / re.sub(r"\W+", "_", name)
            repeat(line, root, log_dir, request["timeout"])
            run = run or next((str(path.parent) for path in log_dir.glob("*/*/result.json")), "")
        print(f"{line.outcome:<9} {name}: {line.said} ({line.seconds:.0f} s)", flush=True)
        lines.append(line)
    rows = [["what", "", "measured, or said", "s"], ["---"] * 4]
    rows += [[line.name, line.outcome, line.said.replace("|", "\\|"), f"{line.seconds:.0f}"] for line in lines]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    commands = "\n".join(f"{line.command}   # {line.name}" for line in lines)
    text = f"# What works on {hardware}, {time.strftime('%Y-%m-%d')}\n\n{table}\n\n```bash\n{commands}\n```\n"
    write_atomically(output / "results.md", text)
    environment = {key: value for key, value in describe_environment().items() if key != "git_diff"}
    facts = {"request": request, "hardware": hardware, "environment": environment, "lines": list(map(asdict, lines))}
    write_atomically(output / "results.json", json.dumps(facts, indent=2) + "\n")
    print(f"\n{table}\nWritten to {output}")
    return int(any(line.outcome in ("failed", "timed out") for line in lines))


def _hardware(accelerator: str) -> tuple[str, int]:
    """Return the devices in words, and how many processes may train."""
    import torch  # slow: imported after the keys are checked

    if accelerator == "cpu":
        return f"the CPU, {os.cpu_count()} cores, torch {torch.__version__}", 2
    devices = torch.cuda.device_count()
    require(devices > 0, "no NVIDIA GPU is visible: accelerator=cpu runs the same lines on the CPU (docs/gpu.md).")
    return f"{devices} x {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, torch {torch.__version__}", devices


def command_of(name: str, request: dict[str, Any], run: str) -> str:
    """Return the arguments of `python` for a line; `run` is the directory for commands on a run."""
    if name in ON_A_RUN:
        device = "cpu" if request["accelerator"] == "cpu" else "cuda"
        return ON_A_RUN[name].format(run=shlex.quote(run), accelerator=request["accelerator"], device=device)
    common = TOKENS if name in OF_TOKENS else COMMON
    overrides = [*common.split(), f"trainer.accelerator={request['accelerator']}", *TRAINED[name][0].split()]
    return shlex.join(["train.py", *overrides, *request["overrides"]])


def repeat(line: Line, root: Path, log_dir: Path, timeout: float) -> None:
    """Run a line's command in a subprocess, with runs below `log_dir`, and set its outcome."""
    script, *arguments = shlex.split(line.command)[1:]
    more = [] if line.name in ON_A_RUN else [f"paths.log_dir={log_dir}"]
    began = time.monotonic()
    with subprocess.Popen(  # noqa: S603
        [sys.executable, str(root / script), *arguments, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that its ranks are killed too
    ) as process:
        try:
            printed, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, _ = process.communicate()
            line.outcome, line.said = "timed out", f"no end within timeout={timeout:g} s"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    line.seconds = time.monotonic() - began
    if not line.outcome:
        line.outcome, line.said = judge(process.returncode, printed, log_dir)


def judge(code: int, printed: str, log_dir: Path) -> tuple[str, str]:
    """Return the outcome of a command that has ended, and its measurement or message."""
    lines = [text.strip() for text in printed.splitlines() if text.strip()]
    errors = [text.removeprefix("Error: ") for text in lines if text.startswith("Error: ")]
    if code and errors and "Traceback" not in printed:
        return "refused", errors[0]
    if code:
        return "failed", lines[-1][:300] if lines else f"exit code {code}"
    path = next(log_dir.glob("*/*/result.json"), None)
    result = json.loads(path.read_text()) if path else {}
    units = {"samples_per_s": "samples/s", "tokens_per_s": "tokens/s", "step_ms": "ms a step", "test/loss": "test loss"}
    return "works", ", ".join(f"{result[key]:,.4g} {unit}" for key, unit in units.items() if result.get(key)) or "done"
