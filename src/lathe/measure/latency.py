"""How long calls take, beside each other: one process, one call of each in turn, so that what disturbs the machine
disturbs all alike.
"""

import gc
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

MARGIN = 0.03  # medians that differ by less than this share count as the same, however tight their ranges
CLEAR = 1.5  # medians that differ by this factor count as different, even where their ranges touch


@dataclass(frozen=True)
class Latency:
    """Seconds of a call: the median of `n` calls, and the 10th and 90th percentile as their spread."""

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
    """Times `calls` in rounds: each round makes one timed call of each, in an order that is drawn anew.

    Just before its timed call each is called once untimed, so that it finds its own weights in the cache and not
    another net's, as it would where it serves alone. Garbage is not collected meanwhile.

    Args:
        calls: what is timed, by name.
        repeats: timed calls of each.
        warmup: calls of each before the first round; compilers and allocators are done then.
        seconds: after this time no further round begins, but five are always made; None sets no limit.
        device: a GPU is waited for before and after each call; None or a CPU needs no waiting.
    """
    wait = _wait(device)
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
    return {name: summarised(times[name]) for name in calls}


def _wait(device: torch.device | None) -> Callable[[], Any]:
    if device is not None and device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def summarised(seconds: list[float]) -> Latency:
    """Median and percentiles, interpolated linearly between the calls beside them.

    Raises ValueError for no calls.
    """
    if not seconds:
        raise ValueError("no calls were timed")
    values = sorted(seconds)

    def at(share: float) -> float:
        place = share * (len(values) - 1)
        low = int(place)
        high = min(low + 1, len(values) - 1)
        return values[low] + (place - low) * (values[high] - values[low])

    return Latency(at(0.5), at(0.1), at(0.9), len(values))


def verdict(this: Latency, other: Latency) -> str:
    """ "faster", "same" or "slower" than `other`.

    Different means that the ranges from p10 to p90 lie apart and the medians differ by more than `MARGIN`, or that the
    medians differ by the factor `CLEAR` and more.
    """
    ratio = this.median / other.median
    apart = this.p90 < other.p10 or other.p90 < this.p10
    if (apart and abs(ratio - 1) > MARGIN) or ratio >= CLEAR or ratio <= 1 / CLEAR:
        return "faster" if ratio < 1 else "slower"
    return "same"
