"""The configurations as a package: the clone's own in an editable install, copies in a wheel."""

import json
import shutil
import subprocess
import sys
import zipfile
from importlib import resources
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from support.commands import environment
from support.runs import ROOT, SMALL, config

from lathe.config.resolve import resolve
from lathe.configs import FOLDER

SOURCES = ("src", "configs", "setup.py", "setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")

SCRIPT = '''"""A project's own command over an installed Lathe."""

import hydra

from lathe.launch import launch, report_errors


@report_errors
@hydra.main(version_base="1.3", config_path="pkg://lathe.configs", config_name="train")
def main(cfg):
    return launch(cfg, "lathe.training.train:train")


if __name__ == "__main__":
    main()
'''


def test_an_editable_install_has_the_clones_own_configurations() -> None:
    assert ROOT / "configs" == FOLDER
    packaged = resources.files("lathe.configs").joinpath("train.yaml")
    assert packaged.read_text() == (ROOT / "configs" / "train.yaml").read_text()
    expected = config("model=mlp")
    with initialize_config_module("lathe.configs", version_base="1.3"):
        assert resolve(compose("train", overrides=["model=mlp"])) == expected


def shown(*command: str, cwd: Path, **extra: str) -> str:
    """Return the output of a command, which must succeed."""
    done = subprocess.run(command, cwd=cwd, env=environment(**extra), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_a_wheel_composes_and_trains_in_another_folder(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in SOURCES:  # the build writes into the folder
        here = ROOT / name
        kept = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(here, clone / name, ignore=kept) if here.is_dir() else shutil.copy(here, clone)
    (clone / "configs" / "local" / "default.yaml").write_text("# @package _global_\nseed: 77\n")
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    shown(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), ".", cwd=clone)
    (wheel,) = tmp_path.glob("*.whl")
    travelled = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("lathe/configs/")}
    paths = [path for path in (ROOT / "configs").rglob("*.yaml") if "local" not in path.parts]
    expected = {f"lathe/{path.relative_to(ROOT).as_posix()}" for path in paths}
    assert travelled == expected | {"lathe/configs/__init__.py", "lathe/configs/schema.json"}
    shown(*pip, "install", "--no-deps", "--no-index", "--target", str(tmp_path / "site"), str(wheel), cwd=tmp_path)

    away = tmp_path / "away"
    away.mkdir()
    (away / "train.py").write_text(SCRIPT)
    shutil.rmtree(clone)
    found = {"PYTHONPATH": str(tmp_path / "site")}
    told = shown(sys.executable, "-c", "import lathe.configs as c; print(c.__file__, c.FOLDER)", cwd=away, **found)
    assert told == f"{tmp_path}/site/lathe/configs/__init__.py {tmp_path}/site/lathe/configs\n"
    assert "resnet20" in shown(sys.executable, "train.py", "--help", cwd=away, **found)
    shown(sys.executable, "train.py", *SMALL, "trainer.max_steps=3", cwd=away, **found)
    (result,) = away.glob("logs/*/*/result.json")
    assert json.loads(result.read_text())
