"""scripts/torchserve.sh: its messages, and TorchServe itself if Java is installed."""

import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import psutil
import pytest
from PIL import Image
from support.commands import environment, run
from support.runs import ROOT, SMALL

from lathe.data import Digits
from lathe.export.bundle import MANIFEST, write_manifest

SCRIPT = str(ROOT / "scripts" / "torchserve.sh")
missing = shutil.which("java") is None or not all(map(importlib.util.find_spec, ("ts", "model_archiver")))
needs_torchserve = pytest.mark.skipif(missing, reason="no Java or no TorchServe")


def torchserve(*words: str, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    env = environment(PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **extra)
    command = ["bash", SCRIPT, *words]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)


def of_torchserve(folder: Path) -> list[int]:
    """Return the processes of TorchServe that work in a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            words = " ".join([process.cwd(), *process.cmdline()])
            if process.status() != psutil.STATUS_ZOMBIE and str(folder) in words:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "run is missing: give a run directory, such as run=logs/latest."),
        (("run=nowhere",), "run=nowhere is no run directory"),
        (("predict", "run=."), "TorchServe does not serve this run: bash scripts/torchserve.sh start run="),
    ],
)
def test_a_mistake_costs_one_sentence(tmp_path: Path, words: tuple[str, ...], sentence: str) -> None:
    (tmp_path / "config.yaml").touch()
    done = torchserve(*words, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(sentence)
    assert done.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == ["config.yaml"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that classifies most digits correctly."""
    folder = tmp_path_factory.mktemp("torchserve")
    done = run(*SMALL, "trainer.max_epochs=15", "model.net.width=64", f"paths.log_dir={folder}", cwd=folder)
    assert done.returncode == 0, done.stderr
    return (folder / "latest").resolve()


@pytest.fixture
def digits(tmp_path: Path) -> list[tuple[Path, str]]:
    """Pictures, one of each class, with their classes' names."""
    split = Digits(image_size=8, val_size=200, test_size=297, split_seed=0).load().test
    found = []
    for label in range(10):
        path = tmp_path / f"{label}.png"
        row = next(row for row in split.rows if split.labels[row] == label)
        Image.fromarray(split.images[row][0]).save(path)
        found.append((path, str(label)))
    return found


@pytest.mark.slow
@needs_torchserve
def test_it_archives_starts_predicts_refuses_and_stops(
    trained: Path, digits: list[tuple[Path, str]], tmp_path: Path
) -> None:
    state = trained / "torchserve"
    # all in one
    done = torchserve(f"run={trained}", f"input={digits[0][0]}", cwd=tmp_path, TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"archive: {trained}/exports/torchserve/model.mar" in lines
    assert json.loads(next(line for line in lines if line.startswith("{")))["predictions"][0]["class"] == "0"
    assert lines[-2:] == ["without the key: refused, status 400", "stopped"]
    assert not state.exists()
    assert not of_torchserve(state)

    # one by one
    archived = (trained / "exports" / "torchserve" / "model.mar").stat().st_mtime_ns
    done = torchserve("start", f"run={trained}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (trained / "exports" / "torchserve" / "model.mar").stat().st_mtime_ns == archived
    try:
        assert stat.S_IMODE(state.stat().st_mode) == 0o700
        key = json.loads((state / "key_file.json").read_text())["inference"]["key"]
        assert key not in done.stdout + done.stderr
        for name in ("key_file.json", "key_header"):
            assert stat.S_IMODE((state / name).stat().st_mode) == 0o600
        assert not any(key in " ".join(psutil.Process(pid).cmdline()) for pid in of_torchserve(state))
        config = (state / "config.properties").read_text()
        assert all("127.0.0.1" in line for line in config.splitlines() if "_address=" in line)
        again = torchserve("start", f"run={trained}", cwd=tmp_path)
        assert again.returncode == 1
        assert again.stderr.startswith("TorchServe already serves this run at http://127.0.0.1:")
        right = 0
        for path, label in digits:
            done = torchserve("predict", f"run={trained}", f"input={path}", cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            right += json.loads(done.stdout)["predictions"][0]["class"] == label
        assert right >= 8
        (tmp_path / "bad.json").write_text('{"image": [[1, 2], [3]]}')
        done = torchserve("predict", f"run={trained}", "input=bad.json", cwd=tmp_path)
        assert done.returncode == 1
        assert json.loads(done.stdout)["code"] == 422
        assert "status 422" in done.stderr
    finally:
        done = torchserve("stop", f"run={trained}", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "stopped\n")
    assert not state.exists()
    assert not of_torchserve(state)


@pytest.mark.slow
@needs_torchserve
def test_an_archive_that_can_not_be_loaded_is_said_and_nothing_is_left(trained: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(trained, run_dir)
    if not (run_dir / "exports" / "torchserve").exists():
        assert run(f"run={run_dir}", "target=torchserve", cwd=tmp_path, script="scripts/export.py").returncode == 0
    path = run_dir / "exports" / "torchserve" / "model.mar"
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, b"torn" if name == "model.pt2" else content)
    done = torchserve(f"run={run_dir}", cwd=tmp_path)  # changed since it was exported
    assert done.returncode == 1
    assert done.stderr.startswith(f"{path} is not the file that was exported")
    content = json.loads((path.parent / MANIFEST).read_text())
    write_manifest(path.parent, {key: content[key] for key in content if key not in ("version", "files")})
    (tmp_path / "scratch").mkdir()
    done = torchserve(f"run={run_dir}", cwd=tmp_path, TMPDIR=str(tmp_path / "scratch"))
    assert done.returncode == 1
    assert done.stderr.startswith("TorchServe can't load the archive: the torch_export payload, made with torch")
    assert not (run_dir / "torchserve").exists()
    assert not os.listdir(tmp_path / "scratch") or len(str(tmp_path)) > 60
    assert not of_torchserve(run_dir / "torchserve")
