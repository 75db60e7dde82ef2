"""Every command and every file of the README works as it is printed there."""

import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.commands import environment
from support.runs import ROOT, config, rows, runs

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [
    command
    for language, text in BLOCKS
    if language == "bash"
    for line in text.splitlines()
    for command in line.split(" && ")
    if command
]
TRAINING = [command for command in COMMANDS if command.startswith("python train.py")]

# Commands that are not run here, and why.
SKIPPED = {
    "pip install": ".ci/run runs it, in a fresh environment",
    "python -m pytest": "this is it",
    "python train.py experiment=cifar10_resnet18": "downloads 165 MB; that it composes is tested below",
}
# What is added to keep a command short.
ADDED = {
    "python train.py model=mlp model.net.width=512": ["trainer.max_epochs=2"],
    "python train.py strategy=fsdp": ["trainer.max_epochs=1"],
    "python train.py strategy=tensor": ["trainer.max_epochs=1"],
    "python train.py precision=bf16-mixed compile=default": ["trainer.max_epochs=1", "model=mlp", "model.net.width=4"],
    "python train.py 'logger=": ["trainer.max_epochs=2", "model.net.width=4"],
    "python train.py -m name=nets": ["trainer.max_epochs=1"],
    "python train.py -m optimizer.lr": ["trainer.max_epochs=1", "model=mlp"],
    "python train.py resume=auto": ["trainer.max_epochs=1", "model=mlp"],
    "python train.py model=mlp ckpt_path": ["trainer.max_epochs=2"],
    "python train.py model=conv": ["trainer.max_epochs=10"],
    "python train.py compression=prune": ["trainer.max_epochs=4", "compression.receipt=none", "model.net.depth=8"],
    "python train.py compression=[distill": ["trainer.max_epochs=4", "compression.receipt=none", "model.net.depth=8"],
    "python scripts/compress.py": ["compression.receipt=none"],
    # each batch size and number of threads compiles anew
    "python scripts/benchmark.py suite=inference": ["seconds=1", "batches=[8]", "threads=1"],
}


def entry(command: str, table: dict) -> object | None:
    """The table's value for the longest beginning of `command` that it has."""
    found = [start for start in table if command.startswith(start)]
    return table[max(found, key=len)] if found else None


def test_the_readme_is_short_and_has_the_two_commands() -> None:
    assert len(README.splitlines()) <= 150
    assert "pip install -r requirements.txt && python train.py\n" in README
    assert "pip install -r requirements-dev.txt && python -m pytest\n" in README
    assert "python -m pytest\n" in (ROOT / ".ci" / "run").read_text()
    for start in [*ADDED, *SKIPPED]:
        assert any(command.startswith(start) for command in COMMANDS), (
            f"{start}: the README has no such command any more"
        )


def test_its_links_lead_somewhere() -> None:
    assert [
        link
        for link in re.findall(r"\]\(([^)]+)\)", README)
        if not link.startswith("http") and not (ROOT / link).is_file()
    ] == []


def test_every_command_is_known() -> None:
    for command in COMMANDS:
        assert command.startswith(("python train.py", "python scripts/")) or entry(command, SKIPPED), command


@pytest.mark.parametrize("command", [c for c in TRAINING if "model=conv" not in c])
def test_every_training_command_composes(command: str) -> None:
    overrides = [word for word in shlex.split(command)[2:] if word != "-m"]
    first = [re.sub(r"^([\w.]+=)([^\[,]+),.*$", r"\1\2", word) for word in overrides]  # of a sweep, its first job
    cfg = config(*first)
    for key, value in (word.split("=", 1) for word in first if re.match(r"\w+\.[\w.]+=[^\[]", word)):
        found = cfg
        for part in key.split("."):
            found = found[part]
        assert found == yaml.safe_load(value) or found == float(value)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone as a user has it, with the README's own files in it and some images to predict."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("configs", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", folder)
    for _, text in BLOCKS:
        title = re.match(r"# ((?:src|configs)/\S+)\n", text)
        if title:
            (folder / title.group(1)).parent.mkdir(parents=True, exist_ok=True)
            (folder / title.group(1)).write_text(text)
    np.save(folder / "images.npy", np.random.default_rng(0).integers(0, 256, (5, 8, 8), dtype=np.uint8))
    return folder


def run(command: str, folder: Path) -> str:
    words = shlex.split(command)
    assert words[0] == "python"
    path = os.pathsep.join([str(folder / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *words[1:], *(entry(command, ADDED) or [])],
        cwd=folder,
        env=environment(PYTHONPATH=path, COLUMNS="200"),
        capture_output=True,
        text=True,
        timeout=600,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def processor_seconds() -> float:
    """What the commands up to now have computed."""
    told = resource.getrusage(resource.RUSAGE_CHILDREN)
    return told.ru_utime + told.ru_stime


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in COMMANDS if entry(c, SKIPPED) is None])
def test_command(command: str, workspace: Path) -> None:
    """In the README's order: later commands use what earlier ones left."""
    before = runs(workspace / "logs")
    result_before = (workspace / "logs" / "latest" / "result.json").read_text() if before else ""
    used = processor_seconds()
    printed = run(command, workspace)
    used = processor_seconds() - used
    new = [path for path in runs(workspace / "logs") if path not in before]
    latest = (workspace / "logs" / "latest").resolve()
    if command.startswith("python scripts/evaluate.py"):
        assert "val/accuracy" in printed
        assert new == []
        return
    if command.startswith("python scripts/predict.py"):
        lines = (workspace / "predictions.csv").read_text().splitlines()
        assert lines[0] == "image,prediction,probability"
        assert [line.split(",")[0] for line in lines[1:]] == ["0", "1", "2", "3", "4"]
        assert all(0 <= int(line.split(",")[1]) <= 9 and 0.1 <= float(line.split(",")[2]) <= 1 for line in lines[1:])
        return
    if command.startswith("python scripts/report.py"):
        assert new == []
        assert "4 runs (4 complete) in 2 groups" in printed
        assert (workspace / "logs" / "nets" / "report" / "report.html").is_file()
        return
    if command.startswith("python scripts/export.py"):
        assert new == []
        for target in ("onnx", "onnx_int8"):
            report = json.loads((latest / "exports" / target / "parity.json").read_text())
            assert report["held_out"]["relative"] <= report["tolerance"]
        return
    if command.startswith("python scripts/benchmark.py"):
        assert new == []
        assert "onnx_int8" in printed
        return
    result = json.loads((latest / "result.json").read_text())
    if command.startswith("python scripts/receipt.py"):
        assert new == []
        assert "slower" in (latest / "receipt.md").read_text() or "faster" in (latest / "receipt.md").read_text()
        assert json.loads((latest / "receipt.json").read_text())
        return
    if command.startswith("python scripts/compress.py"):
        assert len(new) == 1
        assert json.loads((new[0] / "result.json").read_text())["test/accuracy"] > 0.5
        return
    if "resume=logs/latest" in command:
        assert new == []
        assert result["epochs"] == 40 > json.loads(result_before)["epochs"]
        steps = [int(row["step"]) for row in rows(latest)]
        assert steps == sorted(set(steps))
        assert steps[-1] == result["steps"]
        return
    jobs = {"python train.py -m name=nets": 4, "python train.py -m optimizer.lr": 3}
    assert len(new) == (entry(command, jobs) or 1)
    assert latest in new
    assert all((path / "result.json").is_file() for path in new)
    # each job of a sweep has its own
    told = [(path / "output.log").read_text() for path in new] if " -m " in command else [printed]
    assert all("Run complete" in text for text in told)
    assert all(("test/accuracy" in text) == ("debug=profiler" not in command) for text in told)  # a profile has no test
    if command == "python train.py":
        assert result["test/accuracy"] >= 0.98
        assert used < 60  # of the processor: the clock's depend on what else runs here
        assert len(re.findall(r"^  python ", printed, flags=re.MULTILINE)) == 3
    if "trainer.devices=2" in command:
        assert result["devices"] == 2
    if "logger=" in command:
        assert list((latest / "tensorboard").glob("events.out.tfevents.*"))
        assert list((latest / "wandb").glob("offline-run-*"))
    if "debug=profiler" in command:
        assert list(latest.glob("profile/*.pt.trace.json"))
        assert "CPU self time of 10 training steps" in printed
    if "model=conv" in command:
        assert result["test/accuracy"] > 0.9
        assert result["parameters"] == (9 * 1 + 1) * 16 + (16 + 1) * 2
