"""A run with an export, shared by the server's tests."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from support.browser import Tabs, open_browser
from support.runs import ROOT, SMALL, new_run

from lathe import export
from lathe.config.schema import problems
from lathe.errors import refuse
from lathe.export.bundle import open_bundle, write_manifest
from lathe.runs.export_model import open_export_model
from lathe.serving.options import read
from lathe.training.train import train


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Train an MLP on digits and export it to ONNX, with scripts/export.py's manifest but no parity check."""

    def make(*overrides: str) -> Path:
        cfg = new_run(tmp_path_factory.mktemp("logs"), *SMALL, *overrides)
        train(cfg)
        run = Path(cfg["paths"]["run_dir"])
        model, folder = open_export_model(run), run / "exports/onnx"
        folder.mkdir(parents=True)
        export.get("onnx").export(model.net, model.example, folder / "model.onnx")
        write_manifest(folder, {"target": "onnx", "file": "model.onnx", **model.facts})
        return run

    return make


@pytest.fixture(scope="session")
def served_run(exported: Callable[..., Path]) -> Path:
    return exported("trainer.max_epochs=1")


@pytest.fixture(scope="session")
def bare(served_run: Path) -> Callable[[np.ndarray], np.ndarray]:
    """The export without a server: uint8 `[n, 1, 8, 8]` to logits `[n, 10]`."""
    return open_bundle(served_run / "exports/onnx", 1)


@pytest.fixture(scope="session")
def digits() -> np.ndarray:
    """Distinct images, uint8 `[512, 1, 8, 8]`."""
    return np.random.default_rng(0).integers(0, 256, (512, 1, 8, 8), dtype=np.uint8)


@pytest.fixture(scope="session")
def options() -> Callable[..., Any]:
    """The options of configs/serve.yaml with some changed, validated as the launch does it."""
    given = OmegaConf.to_container(OmegaConf.load(ROOT / "configs/serve.yaml"))
    assert isinstance(given, dict)

    def changed(**changes: Any) -> Any:
        asked = {**given, "export": "onnx", **changes}
        refuse(sentence for key, sentence in problems(asked, "serve", saved=True) if key.split(".")[0] in changes)
        return read(asked, "a_run")

    return changed


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as found:
        yield found


@pytest.fixture(scope="module")
def tabs(browser: Any) -> Tabs:
    return Tabs(browser)


@pytest.fixture
def tab(tabs: Tabs) -> Iterator[Any]:
    with tabs.tab() as found:
        yield found
