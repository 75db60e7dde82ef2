"""Time all forms of a net, interleaved, in each cell: a device, a batch size and a number of threads."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lathe.measure import Latency, interleaved, verdict
from lathe.measure.latency import MARGIN
from lathe.receipt.forms import Form, Opened, reason

UNCLEAR = "within noise"
Cell = tuple[torch.device, int, int]
BESIDE = {"eager": "dense eager", "bf16": "dense compiled_bf16"}  # the references of every row
FLOAT_TWIN = {
    "onnx_int8": "onnx",
    "aot_inductor": "compiled_fp32",
}  # the same runtime of the dense net, if it has another name


class Limits(Protocol):
    """The limits of measuring a cell."""

    @property
    def repeats(self) -> int: ...
    @property
    def warmup(self) -> int: ...
    @property
    def seconds(self) -> float: ...


def beside_dense(form: Form) -> dict[str, str]:
    """Return the names of the forms that a row is compared with, by column."""
    # the gain over the twin is due to compression, not to the runtime
    return {**BESIDE, "twin": f"dense {FLOAT_TWIN.get(form.backend, form.backend)}"}


def time_forms(
    forms: Sequence[Form],
    cells: Sequence[Cell],
    sample: Callable[[int], Tensor],
    limits: Limits,
    left_out: list[dict[str, str]],
    beside: Callable[[Form], Mapping[str, str]] = beside_dense,
    check: Callable[[Form, Opened], None] | None = None,
    step: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Return a row for each form in each cell; `sample` makes a batch of a given size.

    Forms that can't be opened, or fail `check`, go to `left_out` with the reason. `step` is called before each form is
    opened, and before calls are timed.
    """
    rows: list[dict[str, Any]] = []
    for device, batch, threads in cells:
        torch.set_num_threads(threads)
        x, opened = sample(batch), dict[str, Opened]()
        there = [form for form in forms if form.device == device]
        for form in there:
            step(f"{form.name}, batch {batch}")
            try:
                opened[form.name] = form.open(x, threads)
                opened[form.name].call()
                if check is not None:
                    check(form, opened[form.name])
            except Exception as error:  # a failing back end must not hide the others
                opened.pop(form.name, None)
                where = f"{form.name}, {device.type}, batch {batch}, {threads} thread{'s' * (threads > 1)}"
                left_out.append({"form": where, "reason": reason(error)})
        calls = {name: form.call for name, form in opened.items()}
        step(f"timing, batch {batch}")
        times = interleaved(calls, limits.repeats, limits.warmup, limits.seconds, device)
        rows += [_row(form, times, beside(form), device, batch, threads) for form in there if form.name in times]
        opened.clear()
        torch.compiler.reset()  # earlier cells' graphs would count towards torch's recompile limit
    return rows


def told_verdict(row: Mapping[str, Any], key: str) -> str:
    """Return the verdict on a row; "within noise" if medians differ, but their ranges overlap."""
    found = row[f"beside_{key}"] or ""
    return UNCLEAR if found == "same" and abs(row[f"over_{key}"] - 1) > MARGIN else str(found)


def _row(
    form: Form, times: Mapping[str, Latency], beside: Mapping[str, str], device: torch.device, batch: int, threads: int
) -> dict[str, Any]:
    this = times[form.name]
    row: dict[str, Any] = {
        "of": form.of,
        "backend": form.backend,
        "device": device.type,
        "batch": batch,
        "threads": threads if device.type == "cpu" else None,
        "median_ms": this.median * 1e3,
        "p10_ms": this.p10 * 1e3,
        "p90_ms": this.p90 * 1e3,
        "n": this.n,
    }
    for key, name in beside.items():
        other = times.get(name)
        row[f"over_{key}"] = this.median / other.median if other else None
        row[f"beside_{key}"] = verdict(this, other) if other and name != form.name else None
    return row
