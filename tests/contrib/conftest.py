"""Nets for the tests of exports, and archives of target=torchserve."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.export_nets import images, make_images, make_mlp, make_resnet, quantized
from support.torchserve_archives import PIXELS, Context, archived, shipped

from lathe.contrib import torchserve_handler as handler

__all__ = ["images", "make_images", "make_mlp", "make_resnet", "quantized"]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[int, dict[str, Any]]]]:
    """Send a batch of (body, content type) to the handler of an archive; return statuses and answers."""
    monkeypatch.setattr(handler, "model", None)

    def send(folder: Path, *requests: tuple[Any, str]) -> list[tuple[int, dict[str, Any]]]:
        context = Context(folder, *(kind for _, kind in requests))
        if handler.model is None:
            assert handler.handle(None, context) is None
        found = handler.handle([{"body": body} for body, _ in requests], context)
        assert found is not None
        assert set(context.answered.values()) == {"application/json"}
        return [(context.statuses[index], json.loads(answer)) for index, answer in enumerate(found)]

    return send


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an archive of `shipped()`, with the .mar next to it."""
    path = tmp_path_factory.mktemp("archive") / "m.mar"
    return archived(path, shipped(), torch.zeros(2, 1, 8, 8, dtype=torch.uint8), facts=PIXELS, top_k=3, max_pixels=1000)
