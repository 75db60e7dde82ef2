"""The core of a user's LightningModule as it is exported: a function of named arrays."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lathe.errors import require
from lathe.export.inputs import FlatCore, as_list
from lathe.measure.calls import Call
from lathe.runs.export_model import ExportModel, opened
from lathe.runs.rundir import open_run
from lathe.tasks.core import EXAMPLE, record_calls

HELD = 64  # held-out batches to compare, without target.samples


@dataclass
class CoreModel(ExportModel):
    """A core to export. `net` is the `FlatCore` of it, `example` its inputs, `trained` the core of the run's task."""

    net: FlatCore
    example: tuple[Tensor, ...]  # type: ignore[assignment]

    @property
    def inner(self) -> nn.Module:
        """The core that is exported: the run's own, or a copy of it in integers or floats."""
        return self.net.core

    def held_out(self, split: str, samples: int | None) -> list[tuple[Tensor, ...]]:
        """Return the inputs of the core in the first batches of a split, for at least `samples` samples."""
        batches = self.data.eval_loader(split)
        first = record_calls(self.task, batches, 1)
        require(bool(first), f"target.split={split}: the run's data have no batch there.")
        limit = HELD if samples is None else max(1, -(-samples // first[0].samples()))
        found = [self.net.tensors_of(call.args, call.kwargs) for call in record_calls(self.task, batches, limit)]
        shapes = [tensor.shape for tensor in self.example]
        fixed = not self.net.has_batch
        return [each for each in found if [x.shape for x in each] == shapes] if fixed else found

    def odd_inputs(self) -> list[tuple[Tensor, ...]]:
        """Return the example in batch sizes that were not traced."""
        if not self.net.has_batch:
            return [self.example]
        return [self.net.rows(self.example, count) for count in (1, 2, 3, 7, 16, 33)]

    def replacement(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward pass for the core in its module that runs a file: `run` takes and returns arrays."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            arrays = [tensor.detach().cpu().numpy() for tensor in self.net.tensors_of(args, kwargs)]
            return self.net.nest(list(map(torch.from_numpy, as_list(run(*arrays)))))

        return forward


def open_core(
    path: str | Path,
    *,
    checkpoint: str = "best",
    integers: bool | None = None,
    axes: Mapping[str, Mapping[Any, str]] | None = None,
    eval_batch_size: int | None = None,
    data_folder: str | None = None,
    key: str = "run",
) -> CoreModel:
    """Open the core of a run's LightningModule for an export target, with the arguments of example.pt.

    Args:
        integers: as for `ExportModel.in_numbers`.
        axes: dynamic axes in addition to the batch, by input and number.
        eval_batch_size, data_folder: replace those of the run, unless None.

    Raises:
        UserError: the core's inputs or outputs are not tensors.
    """
    run = open_run(path, key)
    found = opened(CoreModel, run, key, checkpoint, eval_batch_size, data_folder)
    task: Any = found.task
    file = run.path / EXAMPLE
    call = Call.load(file) if file.is_file() else record_calls(task, found.data.eval_loader("val"), 1)[0]
    found.net = FlatCore(found.in_numbers(integers), call.args, call.kwargs)
    found.net.find_batch()
    found.net.declare_axes(axes or {})
    found.example = found.net.example
    found.facts |= {"module": type(task.net).__name__, "core": task.core_name, "classes": None, "preprocess": None}
    found.facts |= found.net.describe()
    return found
