"""Runs the stages of a pipeline: forward only, or forward and backward under one of torch's schedules."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.modules.batchnorm import _BatchNorm

from lathe.errors import require
from lathe.strategies.pipeline.cut import Cut

Shape = tuple[torch.Size, torch.dtype]


def count_microbatches(net: nn.Module, asked: int | None, schedule: str, stages: int) -> int:
    """Return the number of micro-batches per batch.

    By default it is 1 for a net with BatchNorm, which needs the whole batch; a larger number warns on rank 0.
    """
    norm = any(isinstance(module, _BatchNorm) for module in net.modules())
    count = asked if asked is not None else 1 if norm else 2 * stages
    why = f" (null is 1 for {type(net).__name__}, which has BatchNorm)" if norm and asked is None else ""
    if norm and count > 1:
        rank_zero_warn(
            f"strategy.microbatches={count}: BatchNorm sees one micro-batch at a time, so the result depends on this "
            "number."
        )
    said = f"strategy.microbatches={count}{why}: strategy.schedule={schedule}"
    enough = schedule != "1f1b" or count >= stages
    require(enough, f"{said} needs at least strategy.stages={stages}; raise it, or use strategy.schedule=gpipe.")
    rounds = max(1, count // stages)
    equal = schedule != "interleaved" or count % rounds == 0
    require(equal, f"{said} runs them in {rounds} equal rounds; use a multiple of strategy.stages={stages}.")
    return count


class Flow:
    """Runs a cut net with the other stages of `group`. Methods are collective, with the same input on all.

    A forward pass over zeros in evaluation mode finds the shapes between stages: it changes no statistics and draws no
    random numbers. torch's own inference would call modules and loss once more in training mode.
    """

    def __init__(
        self, cut: Cut, schedule: str, microbatches: int, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.cut, self.kind, self.microbatches, self.group, self.device = cut, schedule, microbatches, group, device
        self._shapes: dict[Shape, list[Shape]] = {}
        self._schedules: dict[Shape, Any] = {}
        self._judge: Callable[[Tensor, Tensor], Tensor] | None = None

    def _rank(self, k: int) -> int:
        return dist.get_global_rank(self.group, self.cut.owner(k))

    def shapes(self, x: Tensor) -> list[Shape]:
        """Return shape and dtype before each slice and after the last, for an input like `x`."""
        key = (x.shape, x.dtype)
        if key not in self._shapes:
            flow: list[Shape] = [key]
            modes = [(module, module.training) for module in self.cut.net.modules()]
            self.cut.net.eval()
            try:
                for k in range(self.cut.total):
                    box: list[Any] = [None]
                    if k in self.cut.slices:
                        shape, dtype = flow[-1]
                        with torch.no_grad():
                            out = self.cut.slices[k](torch.zeros(shape, dtype=dtype, device=self.device))
                        box = [(tuple(out.shape), out.dtype)]
                    dist.broadcast_object_list(box, src=self._rank(k), group=self.group, device=self.device)
                    flow.append((torch.Size(box[0][0]), box[0][1]))
            finally:
                for module, training in modes:
                    module.training = training
            self._shapes[key] = flow
        return self._shapes[key]

    def step(self, x: Tensor, part: Tensor, judge: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Run forward and backward passes of all micro-batches; gradients accumulate in the parameters.

        `part` is a micro-batch, for shapes. `judge` returns the last stage's loss, given outputs and the number of the
        micro-batch as a tensor of one element.
        """
        key = (part.shape, part.dtype)
        if key not in self._schedules:
            self._schedules[key] = self._make(self.shapes(part))
        self._judge = judge
        schedule = self._schedules[key]
        # targets are numbers of micro-batches, whose targets may be several tensors
        target = torch.arange(self.microbatches) if self.cut.last else None
        schedule.step(*([x] if self.cut.first else []), target=target, **_without_outputs(schedule))
        self._judge = None

    def _make(self, shapes: list[Shape]) -> Any:
        stages: list[Any] = []
        for k, submodule in self.cut.slices.items():
            (before, before_type), (behind, behind_type) = shapes[k], shapes[k + 1]
            stages.append(
                PipelineStage(
                    submodule,
                    k,
                    self.cut.total,
                    self.device,
                    group=self.group,
                    input_args=torch.empty(before, dtype=before_type, device="meta", requires_grad=k > 0),
                    output_args=torch.empty(behind, dtype=behind_type, device="meta", requires_grad=True),
                )
            )
        options: dict[str, Any] = {
            "n_microbatches": self.microbatches,
            "loss_fn": lambda outputs, target: self._judge(outputs, target),  # type: ignore[misc]  # set for each step
            "scale_grads": False,  # the loss is scaled before half precision could overflow
        }
        if self.kind == "interleaved":
            return ScheduleInterleaved1F1B(stages, **options)
        return (ScheduleGPipe if self.kind == "gpipe" else Schedule1F1B)(stages[0], **options)

    def forward(self, x: Tensor) -> Tensor | None:
        """Return the net's outputs on the last stage, None on the others; any batch size."""
        chunks = x.chunk(min(2 * self.cut.stages, max(len(x), 1)))
        sent: list[tuple[dist.Work, Tensor]] = []
        outputs = []
        for chunk in chunks:
            shapes = self.shapes(chunk)
            for k, submodule in self.cut.slices.items():
                if k == 0:
                    value = chunk
                else:
                    shape, dtype = shapes[k]
                    value = torch.empty(shape, dtype=dtype, device=self.device)
                    dist.recv(value, src=self._rank(k - 1), group=self.group)
                value = submodule(value)
                if k == self.cut.total - 1:
                    outputs.append(value)
                else:
                    work = dist.isend(value, dst=self._rank(k + 1), group=self.group)
                    assert work is not None
                    sent.append((work, value))
        for work, _ in sent:
            work.wait()
        return torch.cat(outputs) if outputs else None

    def everywhere(self, x: Tensor) -> Tensor:
        """Return the net's outputs on every stage, as `net(x)` does while the net is cut."""
        with torch.no_grad():
            outputs = self.forward(x)
            if outputs is None:
                shape, dtype = self.shapes(x)[-1]
                outputs = torch.empty(shape, dtype=dtype, device=self.device)
            else:
                self.shapes(x)
                outputs = outputs.contiguous()
            dist.broadcast(outputs, src=self._rank(self.cut.total - 1), group=self.group)
        return outputs


def _without_outputs(schedule: Any) -> dict[str, bool]:
    """Return the option that skips merging a training step's outputs, if this torch has it."""
    return {"return_outputs": False} if "return_outputs" in inspect.signature(schedule.step).parameters else {}
