"""The arrays of a user's source are checked once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.runs import SMALL

from lathe.data import ImageDataModule
from lathe.data.source import load_splits
from lathe.data.splits import Split, Splits
from lathe.data.tokens import TokenDataModule
from lathe.errors import UserError

IMAGES, LABELS = np.zeros((30, 1, 8, 8), np.uint8), np.arange(30) % 3
FACTS = {"num_classes": 3, "channels": 1, "image_size": 8}
ROWS = {"train": np.arange(20), "val": np.arange(20, 25), "test": np.arange(25, 30)}


def splits(name: str = "train", **changed: Any) -> Splits:
    """Three splits of 30 grey images, one of them changed."""
    parts = {key: {"images": IMAGES, "labels": LABELS, "rows": rows} for key, rows in ROWS.items()}
    parts[name] |= changed
    return Splits(**{key: Split(**part) for key, part in parts.items()})


class Given:
    """A source that returns given splits."""

    num_classes: Any = 3

    def __init__(self, given: Any = None) -> None:
        self.given = given

    def prepare(self) -> None:
        pass

    def load(self) -> Any:
        return self.given() if callable(self.given) else self.given


def refused(given: Any, **facts: int) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_splits(Given(given), FACTS | facts)
    return list(caught.value.args)


IMAGE, LABEL = "expected a uint8 numpy array [m, channels, height, width].", "expected an int64 numpy array [m]."


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"images": IMAGES / 255}, f"the train split's images are float64 [30, 1, 8, 8], {IMAGE}"),
        ({"labels": LABELS / 1}, f"the train split's labels are float64 [30], {LABEL}"),
        ({"labels": LABELS + 1}, "the train split's labels go from 1 to 3, expected 0 to 2."),
        ({"rows": np.arange(0)}, "the train split has no rows, expected some to train on."),
        (
            {"rows": np.arange(22)},
            "the train and val splits share 2 images, expected none: divide them by their rows.",
        ),
    ],
)
def test_wrong_content_is_named(changed: dict[str, Any], sentence: str) -> None:
    assert refused(splits(**changed)) == [f"data.source: {sentence}"]


def test_several_wrong_facts_are_reported_together() -> None:
    assert refused(splits(), channels=3, image_size=32) == [
        "data.channels=3 is not what the source Given has: set data.channels=1, or change data.source.",
        "data.image_size=32 is not what the source Given has: set data.image_size=8, or change data.source.",
    ]


@pytest.mark.parametrize("name", ["val", "test"])
def test_an_empty_split_warns(name: str) -> None:
    with pytest.warns(UserWarning, match=f"^data.source: the {name} split has no samples, so nothing can be measured"):
        load_splits(Given(splits(name, rows=np.arange(0))), FACTS)


def test_a_class_that_is_not_a_source_is_refused_before_it_is_used() -> None:
    with pytest.raises(UserError, match=r"^data\.source: an object has no num_classes and no prepare and no load"):
        ImageDataModule(object(), **FACTS, mean=[0.0], std=[1.0], batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^data\.source: a Given has no vocab_size"):
        TokenDataModule(Given(), 3, 4, 2)  # type: ignore[arg-type]


def broken() -> Splits:
    np.load("no such file.npy")
    raise AssertionError


def test_what_load_raises_is_one_sentence_with_its_line() -> None:
    line = broken.__code__.co_firstlineno + 1
    (sentence,) = refused(broken)
    assert sentence.startswith("data.source can't be loaded: FileNotFoundError: ")
    assert sentence.endswith(f"no such file.npy' ({__file__}:{line})")


def test_a_training_with_wrong_content_leaves_no_run(
    cli: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user gets only this message."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_own_source.py").write_text(
        "import numpy as np\n"
        "from lathe.data import Split, Splits\n"
        "class Wrong:\n"
        "    num_classes = 10\n"
        "    def prepare(self): pass\n"
        "    def load(self):\n"
        "        split = Split.whole(np.zeros((4, 1, 8, 8), np.uint8), np.full(4, 10))\n"
        "        return Splits(split, split, split)\n"
    )
    code, errors = cli(*SMALL, "~data.source", "+data.source={_target_: my_own_source.Wrong}", "launch.timeout=60")
    assert code == 1
    assert "Traceback" not in errors
    assert "the train split's labels go from 10 to 10" in errors
    assert not list((tmp_path / "logs").glob("*/*/config.yaml"))
