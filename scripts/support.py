"""What works together on this machine: python scripts/support.py writes docs/support.md."""

import contextlib
import io
import json
import os
import platform
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import hydra
from hydra import compose
from omegaconf import DictConfig

from lathe import files
from lathe.config.resolve import resolve
from lathe.errors import UserError, require
from lathe.launch.command_checks import check_command
from lathe.launch.elastic import run_job
from lathe.launch.error_reporting import report_errors
from lathe.runs import rundir
from lathe.runs.run_discovery import metric_rows
from lathe.verbs.evaluate import evaluate
from lathe.verbs.support import graphs, select_models

SHORT = (
    "trainer.accelerator=cpu",
    "trainer.max_epochs=null",
    "trainer.accumulate_grad_batches=2",
    "trainer.gradient_clip_val=0.5",
    "trainer.log_every_n_steps=1",
    "trainer.limit_val_batches=2",
    "trainer.limit_test_batches=2",
    "trainer.check_val_every_n_epoch=null",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "data.batch_size=16",
    "optimizer.lr=0.02",
    "callbacks.throughput=null",
    "callbacks.lr_monitor=null",
    "launch.timeout=120",
)
PARTS = ("plain", "compression", "all")
REGIONAL = ("pipeline", "3d")  # they partition a net between its blocks, so they can only compile blocks
# law 2 in full precision; in other formats, two processes round differently
TOLERANCE = 1e-5


@report_errors
@hydra.main(version_base="1.3", config_path="../configs", config_name="support")
def main(cfg: DictConfig) -> None:
    request = resolve(cfg)
    check_command(cfg, request)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    require(request["processes"] >= 2, f"processes={request['processes']}: expected at least 2.")
    request["models"] = select_models(request["models"], compose("support")["models"])
    Path(request["paths"]["log_dir"]).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=request["paths"]["log_dir"], prefix="support-") as folder:
        cases = all_cases(request)
        for number, case in enumerate(cases):
            case["case"] = number
        references: dict[tuple[str, ...], dict[str, Any]] = {}
        for strategy in ("auto", *request["strategies"]):
            own = [case for case in cases if case["strategy"] == strategy]
            run_strategy(own, request, Path(folder))
            for case in own:
                measure(case, references.get((case["precision"], *column_of(case))))
            if strategy == "auto":
                references = {(case["precision"], *column_of(case)): case for case in own}
    text = page(cases, request)
    print(text)
    if request["output"] is not None:
        files.write_atomically(Path(request["output"]), text)


def all_cases(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every combination of the request's parts."""
    strategies, cases = ["auto", *request["strategies"]], []
    if request["part"] in ("all", "plain"):
        plain = product(strategies, request["models"], request["compiles"], request["precisions"])
        cases += [
            {"strategy": strategy, "precision": precision, "compile": compiled, "model": model, "compression": "none"}
            for strategy, model, compiled, precision in plain
        ]
    if request["part"] in ("all", "compression"):
        compressed = product(strategies, request["compressions"], request["precisions"])
        cases += [
            {"strategy": strategy, "precision": precision, "compile": "none", "model": "resnet", "compression": method}
            for strategy, method, precision in compressed
        ]
    return cases


def column_of(case: dict[str, Any]) -> tuple[str, str, str]:
    """Return what distinguishes a case from others of its strategy and precision."""
    return case["model"], case["compile"], case["compression"]


def configuration(case: dict[str, Any], request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a case's resolved configuration, with a run directory."""
    is_single = case["strategy"] in ("auto", "model_split")
    overrides = [
        *SHORT,
        *request["models"][case["model"]],
        f"strategy={case['strategy']}",
        f"precision={case['precision']}",
        f"compile={case['compile']}",
        f"trainer.devices={1 if is_single else request['processes']}",
        f"trainer.max_steps={request['steps']}",
        f"trainer.val_check_interval={2 * request['steps']}",
        f"paths.log_dir={folder}",
        *request["overrides"],
    ]
    if case["compression"] != "none":
        overrides += [f"compression={case['compression']}", "compression.receipt=none"]
        overrides += request["compressions"][case["compression"]]
    if case["compile"] != "none" and case["precision"] not in request["inductor"]:
        overrides.append("compile.backend=aot_eager")
    if case["strategy"] in REGIONAL and case["compile"] != "none":
        overrides.append("compile.regional=true")
    if case["compile"] != "none":
        overrides.append("+callbacks.graphs._target_=lathe.callbacks.Graphs")
    if case["strategy"] == "model_split":
        overrides.append("strategy.devices=[cpu:0,cpu:0]")
    resolved = resolve(compose("train", overrides=overrides))
    case["run"] = str(rundir.create(folder, resolved, overrides).path)
    return {**resolved, "case": case["case"]}


def run_strategy(cases: list[dict[str, Any]], request: dict[str, Any], folder: Path) -> None:
    """Run a strategy's cases in as few launches as possible: those after a failed one are launched again."""
    processes = 1 if cases[0]["strategy"] in ("auto", "model_split") else request["processes"]
    left = []
    for case in cases:
        try:
            left.append(configuration(case, request, folder))
        except UserError as error:
            case["refused"] = str(error)
    notes = folder / f"{cases[0]['strategy']}.jsonl"
    by_number = {case["case"]: case for case in cases}
    while left:
        broke = None
        try:
            launch = {**left[0], "cases": left, "notes": str(notes)}
            run_job("lathe.verbs.support:run_cases", launch, processes, left[0]["launch"])
        except Exception as error:
            broke = " ".join(str(error).split())[:2000]
        lines = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
        begun = [line["case"] for line in lines if "began" in line]
        for line in lines:
            if "refused" in line:
                by_number[line["case"]] |= {name: line[name] for name in ("refused", "breaks", "made", "anew")}
        ended = {line["case"] for line in lines if "refused" in line}
        for number in set(begun) - ended:
            by_number[number].setdefault("broke", broke or "ended without a word")
        waiting = [case for case in left if case["case"] not in begun]
        require(len(waiting) < len(left), f"strategies=[{cases[0]['strategy']}] can't be launched: {broke}")
        left = waiting


def measure(case: dict[str, Any], reference: dict[str, Any] | None) -> None:
    """Add the largest relative differences: of the losses to the reference, of the test loss to one process."""
    if "refused" not in case or case["refused"] is not None:
        return
    own = losses(case)
    if reference is not None and reference.get("refused", "") is None:
        pairs = list(zip(own, losses(reference), strict=True))
        case["difference"] = max(abs(a - b) / abs(b) for a, b in pairs) if pairs else float("nan")
    if case["compile"] == "none":
        run = rundir.open_run(case["run"], "run")
        cfg = run.config
        cfg["paths"]["run_dir"] = str(run.path)
        cfg["trainer"] |= {"devices": 1, "accelerator": "cpu"}
        cfg["strategy"] = {"_target_": "lathe.strategies.auto"}
        cfg["request"] = {"run": case["run"], "split": "test", "checkpoint": "best", "batch_size": None, "output": None}
        with contextlib.redirect_stdout(io.StringIO()):
            alone = evaluate(cfg)["test/loss"]
        case["evaluated"] = abs(alone - run.result["test/loss"]) / abs(alone)


def losses(case: dict[str, Any]) -> list[float]:
    """Return the training loss of each optimizer step."""
    return [float(row["train/loss"]) for row in metric_rows(Path(case["run"])) if "train/loss" in row]


def page(cases: list[dict[str, Any]], request: dict[str, Any]) -> str:
    """Return both tables as Markdown. A part that was not requested is copied from the existing page."""
    import torch

    requested = PARTS[:2] if request["part"] == "all" else (request["part"],)
    old = Path(request["output"]).read_text() if request["output"] and Path(request["output"]).is_file() else ""
    parts = {}
    for part in PARTS[:2]:
        begin, end = f"<!-- {part} -->\n", f"<!-- end of {part} -->\n"
        own = [case for case in cases if (case["compression"] == "none") == (part == "plain")]
        text = matrix(own, part, request) if part in requested else old.partition(begin)[2].partition(end)[0]
        parts[part] = f"{begin}{text}{end}"
    return f"""# What works together

Written by `python scripts/support.py`: {request["processes"]} processes over gloo on {os.cpu_count()} cores, torch
{torch.__version__.split("+")[0]}, Python {platform.python_version()}. Each combination trains for {request["steps"]}
steps of two accumulated batches with clipped gradients. The number is the largest relative difference of a loss to
one process (`auto`) with the same precision and compilation. In 32-true and 64-true it has to be below
{TOLERANCE:.0e}, where nothing is quantized; in other formats it shows how far apart two processes round.

🟢 all run · 🟡 some run · ⚪ refused at start-up with the reason

## Strategy and precision

{parts["plain"]}
## Strategy and compression

{parts["compression"]}"""


def matrix(cases: list[dict[str, Any]], part: str, request: dict[str, Any]) -> str:
    """Return a table of strategies by precisions or methods, with what its cells contain."""
    ran = [case for case in cases if case.get("refused", "") is None]
    works = [case for case in ran if case["strategy"] != "auto"]
    key = "precision" if part == "plain" else "compression"
    columns = list(dict.fromkeys(case[key] for case in cases))
    rows = [
        [strategy, *(cell([c for c in cases if (c["strategy"], c[key]) == (strategy, column)]) for column in columns)]
        for strategy in request["strategies"]
    ]
    lines = ["| " + " | ".join(row) + " |\n" for row in (["strategy", *columns], ["---"] * (len(columns) + 1), *rows)]
    alone = [case["evaluated"] for case in works if "evaluated" in case]
    evaluation = f"; one process finds their test losses again to within {max(alone):.0e}" if alone else ""
    text = f"{len(works)} combinations run{evaluation}.\n"
    if part == "plain":
        nets = f"{', '.join(request['models'])}, each with compile={' and '.join(request['compiles'])}"
        regional = " and ".join(REGIONAL)
        text += f"A cell has the nets {nets} ({regional}: block by block).\n{graphs(ran)}"
    else:
        text += (
            f"A small ResNet in {', '.join(request['precisions'])}. `tensor` cuts no ResNet; of nets with a tensor\n"
            "plan it takes masks and distillation. Where rounding moves an activation to the next integer, losses\n"
            "differ more."
        )
    return f"{''.join(lines)}\n{text}\n"


def cell(cases: list[dict[str, Any]]) -> str:
    """Return how many cases run, and their largest difference to one process."""
    if any("broke" in case for case in cases):
        return f"**broke**: {next(case['broke'] for case in cases if 'broke' in case)[:300]}".replace("|", "/")
    works = [case for case in cases if case.get("refused", "") is None]
    if not works:
        return "⚪"
    share = "🟢" if len(works) == len(cases) else f"🟡 {len(works)} of {len(cases)}"
    return f"{share} {max((case['difference'] for case in works if 'difference' in case), default=0):.0e}"


if __name__ == "__main__":
    main()
