"""Tasks of inputs and targets; loss and metrics may be the user's."""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lathe.compression.modes import evaluated
from lathe.errors import UserError
from lathe.tasks.base import Task

MAX_ROWS = 2048  # of a trial batch


class SupervisedTask(Task):
    """A batch is `(x, y)`.

    Args:
        loss: a callable `(outputs, targets) -> scalar`, or several by name, whose sum is trained on (`Weighted` weighs
            one); None is the task's own. It does not see the rows that fill up an evaluation batch.
        metrics: what is reported in addition to the loss: names of `known`, which are sums on the device, and
            torchmetrics, as a list or by name; None is the task's own. The first is monitored, unless the task's own
            monitor is listed.
    """

    known: tuple[str, ...] = ()

    @property
    def takes_pairs(self) -> bool:
        """Return whether the task reads `(x, y)` of a batch and nothing else."""
        return self.standard_step

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[[nn.Module], Optimizer] | None = None,
        scheduler: Callable[..., LRScheduler] | None = None,
        init: str | Sequence[str] | None = None,
        loss: Any = None,
        metrics: Any = None,
    ) -> None:
        super().__init__(net, optimizer, scheduler)
        self._loss: Any = None  # an `OwnLoss`
        self._named: list[str] | None = None  # sums that `metrics` asks for
        if init is not None:
            from lathe.nets.init import apply_init

            apply_init(net, init)
        if loss is None and metrics is None:
            return
        from lathe.tasks.loss_and_metrics import Meters, OwnLoss, select_metrics  # most runs take the task's own

        if loss is not None:
            self._loss = OwnLoss(loss)
        if metrics is None:
            return
        sums, objects = select_metrics(metrics, self.known)
        self._named, self.computed = self.sums_of(sums)
        self.metrics = ("loss", *self._named)
        if objects:
            self.meters = Meters(objects)
        ways = {name: metric.higher_is_better for name, metric in objects.items()}
        self.minimised = (*self.minimised, *(name for name, higher in ways.items() if higher is False))
        self.undirected = tuple(name for name, higher in ways.items() if higher is None)
        if self.monitor.partition("/")[2] not in self.reported:
            self.monitor = f"val/{[*self.reported[1:], 'loss'][0]}"

    def sums_of(self, names: list[str]) -> tuple[list[str], tuple[str, ...]]:
        """Return the sums that these of `known` need, and the metrics computed from their means."""
        return names, ()

    @classmethod
    def directions(cls, metrics: Any) -> tuple[str, dict[str, bool | None]]:
        """Return the monitor of a task with these `metrics`, and whether lower is better for each (None: neither)."""
        task = cls(nn.Identity(), metrics=metrics)
        ways = {name: None if name in task.undirected else name in task.minimised for name in task.reported}
        return task.monitor, ways

    @torch.no_grad()
    def check_facts(self, facts: Mapping[str, Any]) -> None:
        """Run the net on one empty image, and try loss and metrics on outputs like these."""
        sizes, outputs = _image_size(facts), None
        with suppress(Exception), evaluated(self.net):  # a net for other images: the first batch raises
            outputs = self.net(torch.zeros(1, *sizes)) if sizes else None
        outputs = outputs if isinstance(outputs, Tensor) else None
        self.check_outputs(outputs, facts)
        width = facts.get("num_classes") if outputs is None else outputs.shape[-1]
        if self.meters is not None and isinstance(width, int):
            self.meters.check_kinds(self.predicts, width)
        if outputs is None or outputs.dim() != 2 or (self._loss is None and self.meters is None):
            return
        trial = torch.randn(
            min(max(2 * outputs.shape[1], 8), MAX_ROWS), outputs.shape[1], generator=torch.Generator().manual_seed(0)
        )
        targets = self.dummy_targets(len(trial), trial.shape[1])
        if self._loss is not None:
            self._loss.check(self.cast_for_loss(trial, targets), targets)
        if self.meters is not None:
            self.meters.check(*self.scored(trial, (None, targets)))

    def take_logits(self, facts: Mapping[str, Any], train: bool) -> None:
        """Reduce the net's outputs to logits, if a copy of it returns more than a tensor for two empty images."""
        sizes = _image_size(facts)
        for mode in (False, True)[: 1 + train] if sizes and self.takes_pairs else ():
            answer: Any = torch.empty(0)
            with suppress(Exception), torch.random.fork_rng(devices=[]), torch.no_grad():  # the first batch raises
                answer = copy.deepcopy(self.net).train(mode)(torch.zeros(2, *sizes))
            if not isinstance(answer, Tensor):
                hook = functools.partial(logits_of, classes=facts.get("num_classes"))
                hook(self.net, (torch.zeros(2),), answer)
                self.net.register_forward_hook(hook)
                return

    def check_outputs(self, outputs: Tensor | None, facts: Mapping[str, Any]) -> None:
        """Raise UserError if the outputs of one image do not fit what the data declares."""
        classes, width = facts.get("num_classes"), None if outputs is None or outputs.dim() != 2 else outputs.shape[-1]
        if self.predicts != "values" and isinstance(classes, int) and width not in (None, classes):
            raise UserError(
                f"data.num_classes={classes}, but the net returns {width} logits: leave model.net.num_classes to "
                "follow the data."
            )

    def dummy_targets(self, rows: int, width: int) -> Tensor:
        """Return targets like the data's, for outputs [rows, width]."""
        raise NotImplementedError

    def cast_for_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return outputs for a loss, in float32 at least: a half-precision sum loses digits."""
        return outputs.to(torch.promote_types(outputs.dtype, torch.float32))

    def counted(self, targets: Tensor) -> Tensor | None:
        """Return the rows that count, and do not only fill up a batch: bool [batch]; None for all."""
        return None

    def _counting(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        rows = None if self.training else self.counted(targets)
        return (outputs, targets) if rows is None else (outputs[rows], targets[rows])

    def own_losses(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the terms of the user's loss; 0 for a batch without counted rows."""
        assert self._loss is not None
        outputs, targets = self._counting(self.cast_for_loss(outputs, targets), targets)
        if not len(targets):
            return {name: outputs.sum() for name in self._loss.terms}
        return self._loss(outputs, targets)

    def on_fit_start(self) -> None:
        divided = self._loss.divided() if self._loss is not None and self.trainer.world_size > 1 else []
        if divided:
            rank_zero_warn(
                f"task.loss={divided[0]}: its mean over class weights depends on which samples a process has, so "
                f"{self.trainer.world_size} processes train on a slightly different loss than one. Use "
                "task.class_weights."
            )


def _image_size(facts: Mapping[str, Any]) -> list[int]:
    sizes: list[Any] = [facts.get(name) for name in ("channels", "image_size", "image_size")]
    return sizes if all(isinstance(size, int) for size in sizes) else []


def logits_of(net: nn.Module, args: Any, outputs: Any, classes: Any = None) -> Tensor:
    """Return the logits of a dict or named tuple with `logits`, or of a tuple with one tensor [batch, classes]: a
    forward hook.
    """
    if isinstance(outputs, Tensor):
        return outputs
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if isinstance(outputs, tuple | list) and logits is None:
        shape = (len(args[0]), classes)
        fitting = [output for output in outputs if isinstance(output, Tensor) and output.shape == shape]
        logits = fitting[0] if len(fitting) == 1 else None
    if not isinstance(logits, Tensor):
        raise UserError(
            f"model.net: {type(net).__name__} returns a {type(outputs).__name__}. Return logits, or a dict with logits."
        )
    return logits
