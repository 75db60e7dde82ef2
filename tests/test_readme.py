"""Every command and file of the README works as printed."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import environment, start
from support.documented import mistakes
from support.runs import ROOT, runs

README = (ROOT / "README.md").read_text()
BLOCK = r"^```bash\n(?P<block>.*?)^```$|^\|[^|]*\| `(?P<cell>[^`|]+)` \|"
COMMANDS = [
    command
    for match in re.finditer(BLOCK, README, flags=re.MULTILINE | re.DOTALL)
    for line in (match["block"] or match["cell"]).splitlines()
    for command in line.split(" # ")[0].split(" && ")
]
OURS = [command for command in COMMANDS if command.startswith(("python train.py", "python scripts/"))]
FILES = re.findall(r"^`((?:src|configs)/\S+)`:\n\n```\w+\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)

# Commands that are not run here, with reasons.
SKIPPED = {
    "python scripts/judge.py": "its exit code is the verdict; tests/verbs/test_judge.py trains both sides",
    "python scripts/serve.py": "test_tutorial runs it",
    "python train.py experiment=cifar10_resnet18": "downloads 165 MB",
    "python scripts/reproduce.py": "tests/verbs/test_reproduce.py runs it on a smaller run",
}
# Overrides that shorten a command in this test.
ADDED = {
    "python train.py -m experiment=mine": ["trainer.max_epochs=1"],
    "python train.py resume=logs/mlp": ["trainer.max_epochs=8"],
    "python train.py name=mlp": ["trainer.max_epochs=5"],
    "python train.py name=auto": ["trainer.max_epochs=3"],
    "python train.py name=logged": ["trainer.max_epochs=3"],
    "python train.py name=samples": ["trainer.max_epochs=3"],
    "python train.py -m name=nets": ["trainer.max_epochs=1"],
    "python train.py -m name=search": ["trainer.max_epochs=2"],
    "python train.py name=channels": ["trainer.max_epochs=4", "compression.receipt=none"],
    "python train.py name=student": ["trainer.max_epochs=4", "compression.receipt=none"],
    "python train.py name=ddp": ["trainer.max_epochs=2"],
    "python scripts/compress.py": ["compression.receipt=none"],
}
# The runs that a command leaves, if not one for train.py and none for the other scripts.
LEFT = {
    "python train.py --help": 0,
    "python train.py resume=logs/mlp": 0,
    "python train.py -m experiment=mine": 6,
    "python train.py -m name=nets": 6,
    "python train.py -m name=search": 8,
    "python train.py": 1,
    "python scripts/compress.py": 1,
    "python scripts": 0,
}


def entry(command: str, table: dict) -> object | None:
    """Return the table's value for the longest prefix of `command` in it."""
    found = [start for start in table if command.startswith(start)]
    return table[max(found, key=len)] if found else None


def test_its_torch_is_the_pinned_one_and_the_tables_here_name_its_commands() -> None:
    (torch,) = re.findall(r"^torch==.*$", (ROOT / "requirements.txt").read_text(), flags=re.MULTILINE)
    assert f"pip install {torch} " in README
    assert [start for start in [*ADDED, *SKIPPED, *LEFT] if not any(c.startswith(start) for c in OURS)] == []


def test_its_links_lead_somewhere() -> None:
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert [link for link in links if not (ROOT / link).is_file()] == []


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's clone with the README's files."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("configs", "scripts", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", folder)
    for name, text in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("command", [command for command in OURS if "experiment=mine" not in command])
def test_every_command_composes(command: str) -> None:
    assert mistakes(command) == []


def run(command: str, folder: Path) -> str:
    """Return the output; the first command runs in a new Python, as a user's does, the others are forked."""
    path = os.pathsep.join([str(folder / "src"), os.environ.get("PYTHONPATH", "")])
    line = [sys.executable, *shlex.split(command)[1:], *(entry(command, ADDED) or [])]
    env = environment(PYTHONPATH=path, COLUMNS="200")
    if command == "python train.py":
        process = subprocess.Popen(
            line, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    else:
        process = start(line, folder, env, merged=True, fork_ranks=True)
    try:
        output, _ = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 0, f"{command}\n{output}"
    return output


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in OURS if entry(command, SKIPPED) is None])
def test_command(command: str, workspace: Path) -> None:
    """In the README's order: later commands use earlier ones' results."""
    before = runs(workspace / "logs")
    printed = run(command, workspace)
    new = [path for path in runs(workspace / "logs") if path not in before]
    assert len(new) == entry(command, LEFT)
    results = [json.loads((path / "result.json").read_text()) for path in new]
    logs = workspace / "logs"
    if command == "python train.py":
        assert results[0]["test/accuracy"] >= 0.98
    elif command == "python train.py experiment=mine":
        assert results[0]["test/accuracy"] > 0.9
        assert new[0].parent.name == "mine"
    elif "resume=logs/mlp" in command:
        (result,) = [json.loads(path.read_text()) for path in logs.glob("mlp/*/result.json")]
        assert result["epochs"] == 8
    elif "report.py" in command:
        assert "6 runs (6 complete) in 2 groups" in printed
        assert (logs / "nets" / "report" / "report.html").is_file()
    elif "logger=" in command:
        assert list(new[0].glob("tensorboard/events.out.tfevents.*"))
        assert list(new[0].glob("wandb/offline-run-*"))
    elif "callbacks=[default,samples]" in command:
        assert (new[0] / "samples" / "val.html").is_file()
    elif "evaluate.py" in command:
        assert "val/accuracy" in printed
    elif "predict.py" in command:
        rows = [line.split(",") for line in (workspace / "predictions.csv").read_text().splitlines()[1:]]
        assert [row[0] for row in rows] == [f"{digit}.png" for digit in range(10)]
        assert sum(row[0] == f"{row[1]}.png" for row in rows) >= 9
    elif "compression" in command:
        assert results[0]["test/accuracy"] > 0.5
        assert {"int8": "ptq_static", "channels": "prune_channels", "student": "distill"}[new[0].parent.name] in (
            new[0] / "config.yaml"
        ).read_text()
    elif "export.py" in command:
        (parity,) = logs.glob("int8/*/exports/onnx_int8/parity.json")
        assert json.loads(parity.read_text())["held_out"]["relative"] <= json.loads(parity.read_text())["tolerance"]
    elif "trainer.devices=2" in command:
        assert results[0]["devices"] == 2
