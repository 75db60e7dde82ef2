"""Latency by a clock that the test advances, and agreement by hand."""

import math
from collections.abc import Callable

import pytest
import torch

from lathe.measure import comparison as latency
from lathe.measure.comparison import Agreement, AgreementMeter, Latency, interleaved, verdict


class Clock:
    """A clock that only calls advance. A call records its name and takes its next duration, repeating the last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.called = 0.0, list[str]()
        monkeypatch.setattr(latency.time, "perf_counter", lambda: self.now)

    def call(self, name: str, *durations: float) -> Callable[[], None]:
        left = list(durations)

        def made() -> None:
            self.called.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return made


def test_calls_take_turns_and_warm_their_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    interleaved({name: clock.call(name, 1.0) for name in "abc"}, repeats=20, warmup=2)
    assert "".join(clock.called[:6]) == "aabbcc"
    rounds = ["".join(clock.called[6 + 6 * i : 12 + 6 * i]) for i in range(20)]
    assert all(sorted(found) == list("aabbcc") for found in rounds)
    assert all(found[0] == found[1] and found[2] == found[3] and found[4] == found[5] for found in rounds)
    assert len(set(rounds)) > 3  # no call always follows the same other one


def test_a_slow_start_and_a_slow_first_call_of_a_turn_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    found = interleaved({"a": clock.call("a", 50.0, 50.0, 9.0, 1.0), "b": clock.call("b", 3.0)}, repeats=3, warmup=2)
    assert found == {"a": Latency(1.0, 1.0, 1.0, 3), "b": Latency(3.0, 3.0, 3.0, 3)}


@pytest.mark.parametrize(
    ("this", "other", "word"),
    [
        ((0.9, 0.88, 0.92), (1.0, 0.95, 1.1), "faster"),
        ((0.98, 0.97, 0.985), (1.0, 0.99, 1.01), "same"),  # apart, but by less than the significant difference
        ((0.9, 0.8, 1.0), (1.0, 0.9, 1.1), "same"),  # the ranges touch
        ((0.6, 0.5, 1.0), (1.0, 0.9, 1.1), "faster"),  # they touch, but the medians differ widely
        ((1.6, 1.0, 1.9), (1.0, 0.9, 1.1), "slower"),
    ],
)
def test_verdicts(this: tuple[float, float, float], other: tuple[float, float, float], word: str) -> None:
    assert verdict(Latency(*this, 10), Latency(*other, 10)) == word


def test_labels_agree_one_by_one_and_values_are_no_predictions() -> None:
    outputs, reference = torch.tensor([[1.0, -2.0], [3.0, -1.0]]), torch.tensor([[2.0, 0.5], [3.0, -4.0]])
    meter = AgreementMeter("labels")
    meter.add(outputs, reference)
    meter.add(outputs, reference, torch.tensor([[True, False], [False, False]]))
    assert meter.result == Agreement(0.8, 3.0, 5)
    meter = AgreementMeter("values")
    meter.add(outputs, reference)
    meter.add(outputs[:, 0], reference[:, 0])
    assert meter.result == Agreement(None, 3.0, 6)

    meter = AgreementMeter()
    meter.add(torch.tensor([[float("nan"), 1.0]]), torch.tensor([[2.0, 1.0]]))
    meter.add(torch.tensor([[2.0, 1.0]]), torch.tensor([[2.0, 1.0]]))
    assert math.isnan(meter.result.largest)
