"""Archives of target=torchserve, and a fake of TorchServe's context."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from lathe.export import get
from lathe.export.inputs import Preprocess, Shipped
from lathe.nets import MLP

NAMES = ["zero", "one", "two", "three"]
PIXELS: dict[str, Any] = {
    "input": {"name": "input", "dtype": "uint8", "shape": ["batch", 1, 8, 8], "layout": "NCHW"},
    "preprocess": {"in_graph": True, "mean": [0.5], "std": [0.25], "size": [8, 8]},
    "classes": NAMES,
}


class Context:
    """The subset of TorchServe's context that the handler uses."""

    def __init__(self, folder: Path, *types: str) -> None:
        self.system_properties = {"model_dir": str(folder)}
        self.types, self.statuses, self.answered = types, dict.fromkeys(range(len(types)), 200), dict[int, str]()

    def get_all_request_header(self, index: int) -> dict[str, Any]:
        return {"body": {"content-type": self.types[index]}, "Host": "127.0.0.1"}

    def set_response_status(self, code: int, phrase: str, idx: int) -> None:
        self.statuses[idx] = code

    def set_response_content_type(self, index: int, value: str) -> None:
        self.answered[index] = value


def shipped(input_size: Any = None) -> nn.Module:
    torch.manual_seed(0)
    net = MLP(channels=1, image_size=8, num_classes=4, width=8, depth=1).eval()
    return Shipped(net, Preprocess([0.5], [0.25], (8, 8), input_size))


def archived(path: Path, net: nn.Module, example: Tensor, facts: dict[str, Any] | None = None, **options: Any) -> Path:
    """Return the folder of the unpacked archive."""
    target = get("torchserve", **options)
    target.facts = facts or {}
    target.export(net, example, path)
    folder = path.with_suffix("")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
    return folder


def same(answer: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two answers are equal, up to the rounding of different batch sizes."""
    first, second = answer["predictions"], other["predictions"]
    return [row["index"] for row in first] == [row["index"] for row in second] and [
        row["probability"] for row in first
    ] == pytest.approx([row["probability"] for row in second], abs=1e-6)


def encoded(pixels: np.ndarray, kind: str) -> bytes:
    buffer = io.BytesIO()
    if kind == "npy":
        np.save(buffer, pixels)
    else:
        Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def pictures(n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (n, 8, 8), dtype=np.uint8)
