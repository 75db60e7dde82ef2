"""--help, --cfg job and a bad override answer without importing torch."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import environment, in_process
from support.runs import ROOT

from lathe.config.help import configuration_folder
from lathe.config.help_key import KeyHelp
from lathe.configs import FOLDER

LINES = (("--help",), ("--cfg", "job"), ("optimizer.lrr=1",), ("optimizer.lr=fast",))
# One command line after the other in a fresh process: what is imported by the end of each, and its exit code.
IN_TURN = """
import json, runpy, sys
from pathlib import Path
script, found = sys.argv[1], []
for words in json.loads(sys.argv[2]):
    if "hydra" in sys.modules:
        sys.modules["hydra.core.global_hydra"].GlobalHydra.instance().clear()
    sys.argv = [script, *words]
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    found.append([code, sorted(name for name in sys.modules if "." not in name)])
Path("found.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, list[str]]]:
    folder = tmp_path_factory.mktemp("lines")
    words = [sys.executable, "-c", IN_TURN, str(ROOT / "train.py"), json.dumps(LINES)]
    done = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [(code, names) for code, names in json.loads((folder / "found.json").read_text())]


@pytest.mark.parametrize("arguments", LINES, ids=str)
def test_torch_is_not_imported(arguments: tuple[str, ...], in_turn: list[tuple[int, list[str]]]) -> None:
    code, imported = in_turn[LINES.index(arguments)]
    assert (code == 0) == arguments[0].startswith("--")
    assert "hydra" in imported, "the list of imports has to be there"
    assert not set(imported) & {"torch", "lightning", "numpy"}


EXPLAINED: dict[str, tuple[list[str], list[str]]] = {
    "a command": ([], ["--help optimizer.lr", "-m seed=1,2,3", "64-true", "resnet18"]),
    "a key": (
        ["optimizer.lr"],
        [
            "optimizer.lr=0.1",
            "takes   a number above 0",
            "means   learning rate at the peak of the schedule",
            "in      configs/optimizer/sgd.yaml",
        ],
    ),
    "an argument that no file has": (
        ["optimizer.amsgrad", "optimizer=adamw"],
        ["an argument of lathe.optim.build_optimizer", "true or false", "with +optimizer.amsgrad=..."],
    ),
    "a group": (
        ["optimizer"],
        [
            "optimizer: optimizer of the weights",
            "radam",
            "chosen  sgd",
            "optimizer.kind.path",
            "a whole number from 1 or null",
            "with a plus: +optimizer.dampening",
        ],
    ),
    "a group without a choice": (["experiment"], ["cifar100_resnet20_dkd, ", "chosen  null"]),
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_a_key_is_explained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    typed, words = EXPLAINED[name]
    assert in_process("train.py", "--help", *typed) == 0
    printed = capsys.readouterr().out
    assert [word for word in words if word not in printed] == []


def test_a_key_that_is_not_chosen_is_explained_with_its_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process("train.py", "--help", "callbacks.ema") == 0
    printed = capsys.readouterr().out
    assert "callbacks.ema.decay" in printed
    *_, last = printed.splitlines()
    assert re.fullmatch(r"  with    callbacks=\[default,\w+\]", last)  # your own choices may have the key too
    assert in_process("train.py", "--help", last.split()[1], "callbacks.ema") == 0
    assert "  with    " not in capsys.readouterr().out


def test_a_key_has_the_meaning_of_its_own_class(tmp_path: Path) -> None:
    """Other models have a key of the same name, with a comment."""
    folder = shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for name, target in (("mine", "mine.Net"), ("ours", "lathe.nets.ViT")):
        (folder / "model" / f"{name}.yaml").write_text(f"net:\n  _target_: {target}\n  width: 32\n")
    assert "means" not in KeyHelp(folder, "train", ["model=mine"]).explain("model.net.width")
    assert "means   features of a token" in KeyHelp(folder, "train", ["model=ours"]).explain("model.net.width")


def test_every_key_is_explained() -> None:
    page = KeyHelp(ROOT / "configs", "train", [])
    for key in page.schemas:
        text = page.explain(key)
        assert text.startswith(key)
        hydras = key.rpartition(".")[2] in ("_target_", "_partial_")
        assert hydras or "_target_" in text or ("takes " in text and "means " in text and "in      configs/" in text)


def test_another_script_is_explained_from_its_own_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process("scripts/evaluate.py", "--help") == 0
    printed = capsys.readouterr().out
    assert [word for word in ("--help run", "64-true", "run: ???") if word not in printed] == []
    assert [word for word in ("optimizer.lr", "-m ", "resnet18") if word in printed] == []
    assert in_process("scripts/evaluate.py", "--help", "run", "batch_size") == 0
    printed = capsys.readouterr().out
    assert "run=???, which has to be given" in printed
    assert printed.count("in      configs/evaluate.yaml") == 2


def test_an_unknown_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process("train.py", "--help", "lr") == 1
    assert capsys.readouterr().err == "Error: --help lr: unknown key; did you mean optimizer.lr?\n"


def test_a_projects_own_configs_folder_is_not_taken_for_lathes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lathe is a package there: train.yaml is its own."""
    (tmp_path / "configs" / "model").mkdir(parents=True)
    monkeypatch.setattr("sys.argv", [str(tmp_path / "train.py")])
    assert configuration_folder() == FOLDER
    (tmp_path / "configs" / "train.yaml").touch()
    assert configuration_folder() == tmp_path / "configs"
