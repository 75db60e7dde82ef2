"""The tests pass in a clone with a user's components, and test these."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import environment
from support.documented import blocks
from support.runs import ROOT

# Tests that read every file of a clone, or its choices.
ENUMERATING = {
    "tests/test_repository.py": "style or layers or path_of_one_machine",
    "tests/test_mine.py": "mine",
    "tests/config/test_choices.py": "of_your_own",
    "tests/config/test_schema.py": "every_file_is_valid or your_own_package",
    "tests/config/test_help.py": "every_key_is_explained",
    "tests/hostile/test_hostile_trust.py": "all_choices or under_src",
}
# In another style than ours, without comments, and in each place of another kind than our files.
FILES = {
    "src/mine/odd.py": """import os, fcntl
from torch import *
import torch.nn as nn
class odd( nn.Module ):
  def __init__(self,channels,num_classes,image_size,width = 16) :
      super().__init__()
      self.a=nn.Linear(channels*image_size**2,width); self.b=nn.Linear(width,num_classes)
  def forward( self,x ): return self.b( self.a(x.flatten(1)).relu() )
def unused(l = []): raise ValueError("a sentence of mine")
""",
    "configs/model/odd.yaml": "net: {_target_: mine.odd.odd, channels: '${data.channels}', width: 8, "
    "num_classes: '${data.num_classes}', image_size: '${data.image_size}'}\n",
    "configs/experiment/a_mine.yaml": "# @package _global_\ndefaults: \n  - override /model: odd\n"
    "  - override /callbacks: [default, largest]\nname: whatever\n",
    "configs/mine.yaml": "how_many: 3\n",
    "scripts/mine.py": "import hydra,os\nx : int = 'a'\nos.rename\n",
    "tests/test_mine.py": "import mine.odd, torch\ndef test_mine( ) :\n  mine.odd.odd(1,2,8)( torch.zeros(3,1,8,8) )\n",
    "tests/helper_of_mine.py": "x=1\n",
    "docs/mine.md": "[that](nowhere.md), `python train.py model=nosuch`\n",
    "configs/student/small.yaml": "net: {_target_: lathe.nets.MLP}\n",
}
COPIED = {"optimizer/adam": "optimizer/adamw", "compression/a_prune": "compression/prune", "data/pets": "data/digits"}
COPIED |= {"target/a_onnx": "target/onnx", "debug/a_limit": "debug/limit", "precision/mine": "precision/bf16-mixed"}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Committed code, and uncommitted configurations."""
    folder = tmp_path / "clone"
    left = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "logs", "data", "*.egg-info", ".venv*")
    shutil.copytree(ROOT, folder, ignore=lambda path, names: left(path, names) if Path(path) == ROOT else [])
    page = ROOT / "docs" / "own_parts.md"
    parts = {re.match(r"# (\S+)\n", text)[1]: text for text in blocks(page, "python", "yaml")}  # type: ignore[index]
    own = {**parts, **FILES}
    for name in sorted(own, key=lambda name: name.startswith("configs")):
        if name.startswith("configs") and not (folder / ".git").exists():
            for words in ("init -q", "add -A", "-c user.name=me -c user.email=me@here commit -qm mine"):
                subprocess.run(["git", *words.split()], cwd=folder, check=True)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(own[name])
    for new, old in COPIED.items():
        shutil.copy(folder / "configs" / f"{old}.yaml", folder / "configs" / f"{new}.yaml")
    return folder


def own_environment(clone: Path) -> dict[str, str]:
    return environment(PYTHONPATH=os.pathsep.join([str(clone / "src"), os.environ.get("PYTHONPATH", "")]))


def run_tests(clone: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m pytest` as a user does in the clone."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "--show-capture=no", *words]
    return subprocess.run(command, cwd=clone, env=own_environment(clone), capture_output=True, text=True)


@pytest.mark.slow
def test_a_clone_with_a_users_parts_passes_except_for_a_wrong_one(clone: Path) -> None:
    wrong = clone / "configs" / "model" / "wrong.yaml"
    wrong.write_text("net: {_target_: mine.odd.odd, channels: 1}\n")
    done = run_tests(clone, *ENUMERATING, "-k", " or ".join(ENUMERATING.values()))
    step = "tests/config/test_choices.py::test_a_choice_of_your_own_makes_a_step"
    assert re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE) == [f"{step}[model=wrong]"], done.stdout[-6000:]
    for choice in ("model=odd", "model=wide", "data=bars", "callbacks=largest", "strategy=patient", "optimizer=adam"):
        assert f"PASSED {step}[{choice}]" in done.stdout
    wrong.unlink()
    made = subprocess.run([sys.executable, "scripts/schema.py"], cwd=clone, env=own_environment(clone))
    assert made.returncode == 0
    assert '"model/odd.yaml"' in (clone / "configs" / "schema.json").read_text()
