"""Components built from Python check their arguments as those of a configuration are checked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lathe.config.types import Count, Share
from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError
from lathe.nets import MLP
from lathe.runs.instantiate import instantiate

SIZES: dict[str, Any] = {"channels": 1, "image_size": 8, "num_classes": 3, "width": 8, "depth": 2}


def test_numbers_of_numpy_are_taken() -> None:
    MLP(**{**SIZES, "width": np.int64(8), "dropout": np.float32(0.5)})
    with pytest.raises(ArgumentError, match=r"^dropout=1\.5: expected a number from 0 and below 1"):
        MLP(**{**SIZES, "dropout": np.float32(1.5)})


def test_every_wrong_argument_is_reported_and_the_builder_adds_the_key() -> None:
    with pytest.raises(ArgumentError) as caught:
        MLP(**{**SIZES, "width": 0, "dropout": 1.0})
    assert [sentence.split("=")[0] for sentence in caught.value.args] == ["width", "dropout"]
    net = {"_target_": "lathe.nets.MLP", **SIZES, "width": 0, "depth": 0}
    with pytest.raises(UserError) as built:
        instantiate({"_target_": "lathe.tasks.ClassificationTask", "net": net}, "model")
    assert [sentence.split(":")[0] for sentence in built.value.args] == ["model.net.width=0", "model.net.depth=0"]


class Wider(MLP):
    """A subclass with arguments of other names."""

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(width=2 * size, **options)


def test_a_subclass_is_checked_by_what_it_passes_on() -> None:
    own = {key: value for key, value in SIZES.items() if key != "width"}
    assert Wider(4, **own)(torch.zeros(2, 1, 8, 8)).shape == (2, 3)
    with pytest.raises(ArgumentError, match=r"^width=0: expected a whole number from 1"):
        Wider(0, **own)


def test_objects_paths_and_tuples_stand_for_nodes_text_and_lists(tmp_path: Path) -> None:
    @validated
    def build(net: nn.Module, folder: str | Path, sizes: list[Count]) -> Any:
        return net, folder, sizes

    net = nn.ReLU()
    assert build(net, tmp_path, (1, 2)) == (net, tmp_path, (1, 2))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^sizes=\[1, 'x'\]: expected a list"):
        build(net, tmp_path, (1, "x"))  # type: ignore[arg-type]


def test_a_dataclass_is_checked() -> None:
    @validated
    @dataclass(frozen=True)
    class Crop:
        padding: Count
        share: Share = 0.5

    assert Crop(2).share == 0.5
    with pytest.raises(ArgumentError, match=r"^padding=0: "):
        Crop(0)
