"""Types, layers and style of Lathe's own packages, and pins.

Scripts and tests are included until you add files to the clone.
"""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.choices import SHARED
from support.runs import ROOT

PACKAGES = ["src/lathe", "src/hydra_plugins", "benchmarks", "train.py", "setup.py"]
OURS = PACKAGES if SHARED else ["."]
# Paths of a developer's machine; in pieces, so that this file does not contain them.
PLACES = ("wor" + "k/", "tmp/" + "venv", "opt/" + "pypi", "opt/" + "wheels")


def run(*command: str) -> None:
    """Run a tool in the repository's root; its output is the failure's message."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("command", ["check", "format --check"])
def test_style(command: str) -> None:
    run(sys.executable, "-m", "ruff", *command.split(), "--quiet", *OURS)


@pytest.mark.slow
def test_types_hold() -> None:
    """All checkouts share mypy's cache, one at a time."""
    kept = Path(os.environ["XDG_STATE_HOME"], "mypy")
    kept.mkdir(parents=True, exist_ok=True)
    paths = ["src/lathe", "benchmarks", "train.py"] if SHARED else []  # else those of pyproject.toml
    with open(kept / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run(sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", str(kept), *paths)


def test_no_file_names_a_path_of_one_machine() -> None:
    pattern = f"(^|[^A-Za-z0-9_.}}])/({'|'.join(PLACES)})"
    words = ["git", "grep", "--untracked", "-nIE", pattern, "--", *OURS]
    assert subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout == ""


def test_layers_import_only_layers_below() -> None:
    run(sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")


def test_launch_imports_no_torch() -> None:
    code = "import sys, lathe.launch.launcher; assert not {'torch', 'lightning', 'numpy'} & set(sys.modules)"
    run(sys.executable, "-c", code)


def test_pins_lie_within_the_ranges() -> None:
    """requirements.txt pins versions that setup.cfg allows, and names every package that setup.cfg needs."""
    import configparser

    from packaging.requirements import Requirement

    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and line[0] not in "#-"]
    pins = {pin.name: str(pin.specifier).removeprefix("==") for pin in map(Requirement, lines)}
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "setup.cfg")
    ranges = [Requirement(line) for line in parser["options"]["install_requires"].split("\n") if line]
    assert [str(item) for item in ranges if item.name not in pins or pins[item.name] not in item.specifier] == []
    extras = [
        Requirement(line)
        for name in ("compress", "export", "wandb")
        for line in parser["options.extras_require"][name].split("\n")
        if line
    ]
    pinned = [item for item in extras if item.name in pins]
    assert {"onnx", "onnxscript", "onnxruntime", "torch-pruning", "wandb"} <= {item.name for item in pinned}
    assert [str(item) for item in pinned if pins[item.name] not in item.specifier] == []
    assert "torchvision" not in pins
