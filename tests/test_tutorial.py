"""Every command of docs/tutorial.md works as printed, in order."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.commands import check, run
from support.runs import ROOT, runs
from support.server_process import Served

import lathe
from lathe.measure import count_macs

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
FILES = re.findall(r"`([\w/]+\.(?:py|yaml))`[^`]*:\n\n```\w+\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
# Overrides that shorten a command in this test.
ADDED = {"name=widths": ["trainer.max_epochs=2"], "experiment=shapes_small": ["compression.receipt=none"]}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_commands_one_after_the_other(tmp_path: Path) -> None:
    for name in ("configs", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", tmp_path)
    for name, text in FILES:
        (tmp_path / name).write_text(text)
    counts = []
    for command in COMMANDS:
        first, *words = shlex.split(command)
        before = runs(tmp_path / "logs")
        if command == "python shapes.py":
            subprocess.run([sys.executable, "shapes.py"], cwd=tmp_path, check=True, timeout=60)
        elif words[0] == "scripts/serve.py":
            served = command
        elif first == "python":
            script, *words = words
            words += [word for part, more in ADDED.items() if part in words for word in more]
            check(run(*words, script=str(tmp_path / script), cwd=tmp_path))
        new = [path for path in runs(tmp_path / "logs") if path not in before]
        counts.append(len(new))
        for path in new:
            accuracy = json.loads((path / "result.json").read_text())["test/accuracy"]
            assert path.parent.name == "widths" or accuracy > 0.85
    assert [count for count in counts if count] == [1, 6, 1]
    (dense,), (small,) = (list((tmp_path / "logs" / name).iterdir()) for name in ("shapes", "shapes_small"))
    assert (dense / "samples" / "val.html").is_file()
    assert (tmp_path / "logs" / "widths" / "report" / "report.html").is_file()
    macs = [count_macs(lathe.load(path).net, torch.zeros(1, 3, 32, 32)).dense for path in (dense, small)]
    assert 0.4 < macs[1] / macs[0] <= 0.5  # which channels go, and so parameters, depends on a CPU's last digits
    predicted = (tmp_path / "predictions.csv").read_text().splitlines()
    assert predicted[0] == "image,prediction,probability,class"
    assert sum(line.endswith(",circle") for line in predicted) > 130
    asks = [command for command in COMMANDS if command.startswith("curl")]
    assert asks[0].endswith("localhost:8000/predict")
    assert "run=logs/shapes_small target=onnx_int8" in served
    with Served(small, "target=onnx_int8", cwd=tmp_path) as server:
        for name in ("circle", "square", "triangle"):
            found = []
            for number in range(5):
                asked = asks[0].replace("circle/000", f"{name}/{number:03}").replace(":8000/", f":{server.port}/")
                line = [*shlex.split(asked), "--silent", "--max-time", "20"]
                done = subprocess.run(line, cwd=tmp_path, capture_output=True, timeout=60, check=True)
                answers = json.loads(done.stdout)["predictions"]
                assert sorted(answer["class"] for answer in answers) == ["circle", "square", "triangle"]
                found.append(answers[0]["class"])
            assert found.count(name) >= 4, found
