"""Comparison of nets: latency, interleaved in one process so that disturbances affect all alike, and equal outputs."""

import gc
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

MARGIN = 0.03  # relative difference up to which medians count as equal, however narrow their ranges
CLEAR = 1.5  # factor from which medians count as different, even if their ranges overlap


@dataclass(frozen=True)
class Latency:
    """Seconds of a call: median, 10th and 90th percentile of `n` calls."""

    median: float
    p10: float
    p90: float
    n: int


def interleaved(
    calls: Mapping[str, Callable[[], Any]],
    repeats: int = 50,
    warmup: int = 5,
    seconds: float | None = None,
    device: torch.device | None = None,
) -> dict[str, Latency]:
    """Time `calls`, functions by name, in rounds of one timed call each, in random order.

    Each timed call follows an untimed one of the same function, so that its weights are in the cache. The garbage
    collector is off during the rounds. `warmup` calls of each come before the first round. No round begins after
    `seconds`, but at least five run. A GPU `device` is synchronized before and after each call.
    """

    def wait() -> None:
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)

    for call in calls.values():
        for _ in range(max(1, warmup)):
            call()
        wait()
    names = list(calls)
    draw = random.Random(0)  # noqa: S311  # an order, not a secret
    times: dict[str, list[float]] = {name: [] for name in names}
    collecting, began = gc.isenabled(), time.perf_counter()
    gc.collect()
    gc.disable()
    try:
        for done in range(max(1, repeats)):
            if seconds is not None and done >= 5 and time.perf_counter() - began > seconds:
                break
            draw.shuffle(names)
            for name in names:
                call = calls[name]
                call()
                wait()
                start = time.perf_counter()
                call()
                wait()
                times[name].append(time.perf_counter() - start)
    finally:
        if collecting:
            gc.enable()
    latencies = {}
    for name in calls:
        p10, median, p90 = np.quantile(times[name], (0.1, 0.5, 0.9)).tolist()
        latencies[name] = Latency(median, p10, p90, len(times[name]))
    return latencies


def verdict(this: Latency, other: Latency) -> str:
    """Return "faster", "same" or "slower": apart in ranges and by `MARGIN`, or by the factor `CLEAR`."""
    ratio = this.median / other.median
    apart = this.p90 < other.p10 or other.p90 < this.p10
    if (apart and abs(ratio - 1) > MARGIN) or ratio >= CLEAR or ratio <= 1 / CLEAR:
        return "faster" if ratio < 1 else "slower"
    return "same"


@dataclass(frozen=True)
class Agreement:
    """Share of equal predictions (None for "values") and largest difference of outputs, over `n` predictions."""

    share: float | None
    largest: float
    n: int


class AgreementMeter:
    """Adds up agreement: of the largest logit of a row ("classes") or the sign of an output ("labels")."""

    def __init__(self, predicts: str = "classes") -> None:
        self._predicts = predicts
        self._equal, self._n, self._largest = 0, 0, 0.0

    def add(self, outputs: Tensor, reference: Tensor, counts: Tensor | None = None) -> None:
        """Add outputs [..., classes] (labels, values: any shape) of both nets, where `counts`. Raises ValueError."""
        if outputs.shape != reference.shape:
            raise ValueError(f"outputs of shape {list(outputs.shape)} and {list(reference.shape)} can't be compared")
        columns = 1 if self._predicts in ("labels", "values") else outputs.shape[-1]
        mine, other = (each.detach().float().reshape(-1, columns) for each in (outputs, reference))
        if counts is not None:
            mine, other = mine[counts.flatten()], other[counts.flatten()]
        if not len(mine):
            return
        answers = [
            each.argmax(-1) if columns > 1 or self._predicts == "classes" else each > 0 for each in (mine, other)
        ]
        self._equal += int((answers[0] == answers[1]).sum())
        self._n += len(mine)
        largest = float((mine - other).abs().max())
        self._largest = largest if math.isnan(largest) else max(self._largest, largest)  # a nan stays

    @property
    def result(self) -> Agreement:
        """Return the agreement so far. Raise ValueError if nothing was compared."""
        if not self._n:
            raise ValueError("nothing was compared")
        share = None if self._predicts == "values" else self._equal / self._n
        return Agreement(share, self._largest, self._n)
