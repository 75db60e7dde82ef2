"""Classes, names and probabilities of logits with known answers."""

import json
from typing import Any

import numpy as np
import pytest

from lathe.serving.answers import answer

NAMED = {"classes": ["cat", "dog", "ship"]}
LOGITS = np.log(np.array([[0.2, 0.7, 0.1], [0.5, 0.25, 0.25]])).astype(np.float32)


def test_the_likeliest_come_first_with_their_names() -> None:
    found = answer(LOGITS, NAMED, 2, single=False)
    assert [[line["class"] for line in row] for row in found["predictions"]] == [["dog", "cat"], ["cat", "dog"]]
    assert [[line["index"] for line in row] for row in found["predictions"]] == [[1, 0], [0, 1]]
    shares = [line["probability"] for row in found["predictions"] for line in row]
    assert shares == pytest.approx([0.7, 0.2, 0.5, 0.25], abs=1e-6)
    assert json.loads(json.dumps(found)) == found


def test_a_single_sample_has_no_list_around_it() -> None:
    assert answer(LOGITS[:1], NAMED, 1, single=True) == {
        "predictions": answer(LOGITS[:1], NAMED, 1, single=False)["predictions"][0]
    }


def test_all_probabilities_add_up_also_of_huge_logits() -> None:
    rows = answer(np.array([[1e30, 1e30, -1e30]], np.float32), NAMED, 99, single=True)["predictions"]
    assert [line["probability"] for line in rows] == [0.5, 0.5, 0.0]
    assert [line["index"] for line in rows] == [0, 1, 2]  # ties go to the lower index
    half = answer(np.array([[60000, 59999, 0]], np.float16), NAMED, 3, single=True)["predictions"]
    assert sum(line["probability"] for line in half) == pytest.approx(1, abs=1e-12)


def test_tokens_are_answered_at_the_last_position() -> None:
    logits = np.zeros((1, 3, 40), np.float32)
    logits[0, 0, 5] = logits[0, 2, 31] = 9
    best = answer(logits, {"classes": None}, 2, single=True)["predictions"]
    assert (best[0]["class"], best[0]["index"], best[1]["index"]) == ("31", 31, 0)
    assert best[0]["probability"] == pytest.approx(np.exp(9) / (np.exp(9) + 39))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error(bad: Any) -> None:
    with pytest.raises(ValueError, match="NaN or infinite logits"):
        answer(np.array([[0.0, bad, 1.0]]), NAMED, 1, single=True)
    with pytest.raises(ValueError, match="NaN or infinite logits"):
        answer(np.full((1, 3), -np.inf), NAMED, 1, single=True)


def test_a_class_that_cant_be_has_no_probability() -> None:
    rows = answer(np.array([[0.0, -np.inf, 0.0]]), NAMED, 3, single=True)["predictions"]
    assert [(line["class"], line["probability"]) for line in rows] == [("cat", 0.5), ("ship", 0.5), ("dog", 0.0)]
