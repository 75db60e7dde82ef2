"""The C++ program in examples/ can be built, and answers as Python does."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from lathe.data import Digits
from lathe.export import get
from lathe.export.inputs import Preprocess, Shipped
from lathe.nets import MLP

SOURCE = Path(__file__).parent.parent / "examples" / "aot_inductor_cpp"
aot = get("aot_inductor")


def ran(program: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *map(str, words)], capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.skipif(aot.available() is not None or shutil.which("cmake") is None, reason="no C++ compiler or no CMake")
def test_the_cpp_program_answers_as_python_does(tmp_path: Path) -> None:
    build = tmp_path / "build"
    configure = ["-S", SOURCE, "-B", build, f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"]
    for words in (configure, ["--build", build]):
        done = subprocess.run(["cmake", *words], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
    program = build / "classify"

    torch.manual_seed(0)
    net = Shipped(MLP(channels=1, image_size=8, num_classes=10, width=16, depth=2), Preprocess([0.3], [0.4], (8, 8)))
    package, pixels = tmp_path / "model.pt2", tmp_path / "pixels.raw"
    images = Digits().load().test.images[:5]
    images.tofile(pixels)
    aot.export(net, torch.zeros(2, 1, 8, 8, dtype=torch.uint8), package)
    with torch.no_grad():
        want = net(torch.from_numpy(np.array(images))).numpy()

    done = ran(program, package, pixels)
    assert (done.returncode, done.stderr) == (0, "")
    rows = np.array([[float(word) for word in line.split()] for line in done.stdout.splitlines()])
    np.testing.assert_array_equal(rows[:, 0], want.argmax(1))
    np.testing.assert_allclose(rows[:, 1:], want, atol=1e-5)

    short, missing = tmp_path / "short.raw", tmp_path / "missing.raw"
    short.write_bytes(pixels.read_bytes()[:100])
    for words, sentence in [
        ((package, short), f"{short} has 100 bytes, which are no whole number of images of 64\n"),
        ((package, missing), f"{missing} is missing, empty or can't be read\n"),
        ((short, pixels), f"{short} can't be loaded, export the run again: "),
    ]:
        done = ran(program, *words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert done.stderr.startswith(f"error: {sentence}")
    assert ran(program).returncode == 2
