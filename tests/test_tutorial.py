"""Every command of docs/tutorial.md works as it is printed there, one after the other."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import check, run
from support.runs import ROOT, config, runs
from support.server_process import Served

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]
TRAINING = [command for command in COMMANDS if command.startswith("python train.py ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reader works, with the pictures that the page's script makes."""
    here = tmp_path_factory.mktemp("here")
    (script,) = (text for language, text in BLOCKS if language == "python")
    title = re.match(r"# (\w+\.py)\n", script)
    assert title
    assert COMMANDS[0] == f"python {title[1]}"
    (here / title[1]).write_text(script)
    subprocess.run([sys.executable, title[1]], cwd=here, check=True, timeout=60)
    return here


def test_the_commands_are_in_their_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [re.sub(r"^python (?:scripts/)?(\w+)\.py.*$|^(curl) .*$", r"\1\2", command) for command in COMMANDS]
    assert kinds == ["shapes", "train", "train", "train", "export", "serve", "curl"]
    monkeypatch.chdir(folder)
    for command, methods in zip(TRAINING, ([], ["prune_channels"], ["qat"]), strict=True):
        cfg = config(*shlex.split(command)[2:])
        assert cfg["data"]["class_names"] == ["circle", "square", "triangle"]
        assert cfg["model"]["net"]["num_classes"] == 3
        assert [name for name, node in cfg["compression"].items() if isinstance(node, dict)] == methods


@pytest.mark.slow
def test_the_answer_has_the_name_of_the_class(folder: Path) -> None:
    for command in TRAINING:
        before = runs(folder / "logs")
        receipt = ["compression.receipt=none"] if "compression=" in command else []  # which measures for some time
        check(run(*shlex.split(command)[2:], *receipt, "trainer.enable_progress_bar=false", cwd=folder))
        (new,) = [path for path in runs(folder / "logs") if path not in before]
        assert (folder / "logs" / "latest").resolve() == new.resolve()
        assert json.loads((new / "result.json").read_text())["test/accuracy"] > 0.85
    _, script, *words = shlex.split(COMMANDS[4])
    check(run(*words, script=script, cwd=folder))
    export = new / "exports" / "onnx_int8"
    assert json.loads((export / "manifest.json").read_text())["classes"] == ["circle", "square", "triangle"]
    _, script, where, target = shlex.split(COMMANDS[5])
    assert (script, where) == ("scripts/serve.py", "run=logs/latest")
    with Served(new, target, cwd=folder) as server:
        for name in ("circle", "square", "triangle"):
            found = []
            for number in range(5):
                asked = COMMANDS[6].replace("circle/000", f"{name}/{number:03}").replace(":8000/", f":{server.port}/")
                if shutil.which("curl") is None:
                    pytest.skip("curl is not there")
                words = [*shlex.split(asked), "--silent", "--max-time", "20"]
                done = subprocess.run(words, cwd=folder, capture_output=True, timeout=60, check=True)
                answers = json.loads(done.stdout)["predictions"]
                assert sorted(answer["class"] for answer in answers) == ["circle", "square", "triangle"]
                found.append(answers[0]["class"])
            assert found.count(name) >= 4, found
