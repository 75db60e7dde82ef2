"""The suite `trainer`: the cost of a training step around the net, relative to a hand-written loop.

All sides train the same net on the same batches. Lathe's final weights must be bit-equal to the hand-written loop's,
except the compiled step's, which sums in another order. Times are CPU time of this process in the training epochs after
the first, which includes compilation.
"""

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lathe.benchmark.spread import Results, Spread, spread, table
from lathe.benchmark.steps import COMPILED, EPOCHS, FULL, HAND, SIDES, SINGLE, Batches, Trained, by_hand
from lathe.benchmark.turns import Claim, Facts, failure, over, take_turns
from lathe.files import scratch
from lathe.measure import plot

LIMITS = {FULL: 1.10, COMPILED: 0.80}


def measure(request: dict[str, Any], output: Path, tell: Callable[[str], None]) -> tuple[Facts, Results]:
    """Measure the time of a step of each side in each round, and compare the weights with the loop's."""
    batches = Batches(request["steps"], request["batch_size"])
    timed = EPOCHS * len(batches)
    expected = by_hand(batches)[1].state_dict()
    with scratch() as kept:

        def turn(side: Callable[[Batches, Path], Trained]) -> dict[str, Any]:
            with scratch(kept) as folder, _silent():
                seconds, net = side(batches, folder)
            equal = all(torch.equal(expected[key], value) for key, value in net.state_dict().items())
            return {"us_per_step": seconds / timed * 1e6, "bit_equal": equal}

        sides = {name: partial(turn, side) for name, side in SIDES.items()}
        tell("warming up")
        take_turns(sides, 1, lambda line: None)
        results = take_turns(sides, request["rounds"], tell)
    return {name: {"updates": (1 + EPOCHS) * len(batches)} for name in sides}, results


def tables(facts: Facts, results: Results, request: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return a row for each side."""
    rows, heights = list[list[str]](), dict[str, dict[str, float]]()
    for name in results:
        cost, share = spread(results, name, "us_per_step"), over(results, name, HAND, "us_per_step")
        if cost is None:
            rows.append([name, failure(results, name), "", "", ""])
            continue
        speed = request["batch_size"] / cost.median * 1e6
        same = all(r["bit_equal"] for r in results[name] if "error" not in r)
        rows.append([name, f"{cost.median:,.0f}", f"{speed:,.0f}", str(share or ""), "yes" if same else "no"])
        heights[name] = {"step, us": cost.median}
    head = [
        "side",
        "CPU time of a step, us",
        "samples a CPU second",
        "over the hand-written loop",
        "its weights, bit by bit",
    ]
    updates = next(iter(facts.values()))["updates"]
    note = (
        f"CPU time of the training process in {EPOCHS} epochs of {request['steps']} steps after one that is not timed "
        f"({updates} updates), batches of {request['batch_size']}; each epoch of Lathe's sides ends with a checkpoint, "
        "and loggers get a line every 10 steps.\n"
    )
    return [table(head, rows), note], plot.stacks("CPU time of a training step", "us", heights)


def claims(results: Results) -> list[Claim]:
    """Return the limits of the full features and the compiled step, and the equality of weights."""
    found: list[Claim] = [
        (f"{name}: step over the hand-written loop's,", over(results, name, HAND, "us_per_step"), {"at_most": limit})
        for name, limit in LIMITS.items()
    ]
    for name in (FULL, SINGLE):
        equal = [float(r["bit_equal"]) for r in results.get(name, []) if "error" not in r]
        measured = Spread([min(equal)]) if equal else None
        found.append((f"{name}: weights bit-equal to the hand-written loop's (1 is yes),", measured, {"at_least": 1.0}))
    return found


@contextmanager
def _silent() -> Iterator[None]:
    """Discard the output, such as progress bars, which must be drawn because their cost counts."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
