"""The teachers of a run: logits and validation metrics."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lathe.callbacks.methods.distill_cache import LogitCache
from lathe.callbacks.methods.distill_layers import KEY, Capture, Probe, probe
from lathe.callbacks.methods.teachers import Average, OpenRun, open_teacher, specs_of
from lathe.data.transfer import val_batches
from lathe.errors import ArgumentError, UserError


class Teachers:
    """Teachers that are not submodules, so that no checkpoint, hyper-parameter or DDP bucket has them.

    `weights` are those of the soft term (None: equal); `cache` MiB of their logits are cached.
    """

    def __init__(self, teacher: Any, weights: Any, ema_decay: float, cache: float) -> None:
        self.specs = specs_of(teacher)
        given = [1.0] * len(self.specs) if weights is None else [float(value) for value in weights]
        if len(given) != len(self.specs):
            raise ArgumentError(
                f"teacher_weights={weights}: give {len(self.specs)} numbers above 0, one for each teacher, or null."
            )
        if cache and "ema" in self.specs:
            raise ArgumentError(
                f"cache={cache} keeps answers of a teacher that stays as it is, and teacher=ema does not: set cache=0."
            )
        self.shares = [value / sum(given) for value in given]
        self.ema_decay = ema_decay
        self.cache = LogitCache(int(cache * 2**20)) if cache else None
        self.average: Average | None = None
        self.nets: list[nn.Module] = []
        self.captures: list[Capture | None] = []
        self.metrics: list[dict[str, float]] = []  # of each teacher on the validation split
        self._dtype = torch.float32

    def open(self, net: nn.Module, open_run: OpenRun | None) -> None:
        """Open the teachers of the student `net`, on the CPU."""
        if self.specs == ["ema"]:
            self.average = Average(net, self.ema_decay)
            self.nets = [self.average.net]
        elif not self.nets:
            self.open_others(open_run)

    def open_others(self, open_run: OpenRun | None) -> None:
        """Open the teachers, unless the teacher is an average of the student."""
        if self.specs != ["ema"]:
            self.nets = [open_teacher(spec, open_run) for spec in self.specs]

    def probed(self, index: int, example: Tensor, student: Probe) -> Probe:
        """Probe teacher `index`; raise UserError if its outputs differ in shape from the student's."""
        name = name_of(self.specs[index])
        try:
            found = probe(self.nets[index], example)
        except (RuntimeError, IndexError, ValueError) as error:
            raise UserError(
                f"{KEY}.teacher={name} can't take this data's inputs of shape {list(example.shape[1:])} "
                f"({' '.join(str(error).split())}): take a teacher that was trained on the same data."
            ) from error
        if found.output.shape != student.output.shape:
            raise UserError(
                f"{KEY}.teacher={name} gives outputs of shape {list(found.output.shape[1:])} and the student "
                f"{list(student.output.shape[1:])}: take a teacher that was trained on the same classes."
            )
        return found

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        self._dtype = torch.float32 if self.average is not None else dtype
        for net in self.nets:
            net.to(device, self._dtype)

    @torch.no_grad()
    def answers(self, x: Tensor) -> Tensor:
        """Return all teachers' logits for the net's input: [batch, teachers, ..., classes]."""
        return self._compute(x) if self.cache is None else self.cache.get(x, self._compute)

    def _compute(self, x: Tensor) -> Tensor:
        answers = [net(self._cast(x)) for net in self.nets]
        return answers[0].unsqueeze(1) if len(answers) == 1 else torch.stack(answers, dim=1)

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self._dtype) if x.is_floating_point() else x

    def forget(self) -> None:
        """Discard the features of the last forward pass."""
        for capture in self.captures:
            if capture is not None:
                capture.found.clear()

    def close(self) -> None:
        for capture in self.captures:
            if capture is not None:
                capture.remove()
        self.nets, self.captures = [], []

    def evaluate(self, trainer: Trainer, task: Any) -> None:
        """Evaluate the teachers on the validation split, over all ranks, and log the monitored metric."""
        monitored = str(task.monitor).partition("/")[2]
        for index, net in enumerate(self.nets):
            total: Tensor | None = None
            meters = None if task.meters is None else task.meters.fresh()
            with (
                torch.random.fork_rng(devices=[]),
                torch.no_grad(),
                _as_evaluated(task),
                trainer.precision_plugin.forward_context(),
            ):
                for batch in val_batches(trainer.datamodule):  # type: ignore[attr-defined]
                    answer = net(self._cast(batch[0]))
                    loss = torch.stack(list(task.losses(answer, batch).values())).sum()
                    sums = task.reduce(answer, batch, loss)
                    total = sums if total is None else total + sums
                    if meters is not None:
                        meters.update("val", *task.scored(answer, batch))
            assert total is not None, "an empty validation split"
            own = {} if meters is None else meters.take("val", trainer)
            means = {name.partition("/")[2]: value for name, value in task._means("val", total).items()}
            self.metrics.append({**means, **own})
            task.write({f"{self._prefix(index)}_{monitored}": self.metrics[-1][monitored]})
        self.forget()

    def compare(self, best: float, metric: str, lower: bool) -> None:
        """Warn if the student's best value of a metric is as good as the best teacher's."""
        theirs = [metrics[metric] for metrics in self.metrics if metric in metrics]
        if theirs and (best <= min(theirs) if lower else best >= max(theirs)):
            rank_zero_warn(
                f"{KEY}.teacher={', '.join(map(name_of, self.specs))} is no better than its student: val/{metric} is "
                f"{(min if lower else max)(theirs):.4g} of the teacher and {best:.4g} of the student; take a better "
                "teacher, or none."
            )

    def check_cache(self) -> None:
        """Warn once if the cache has saved nothing."""
        cache = self.cache
        if cache is None or not cache.lookups or cache.saved or cache.told:
            return
        cache.told = True
        if 4 * cache.hits > cache.lookups:
            rank_zero_warn(
                f"{KEY}.cache: the teachers ran for every batch, since the cache holds {len(cache.rows)} inputs' "
                "answers and a batch is only answered as a whole: give it more MiB, or set cache=0."
            )
        else:
            rank_zero_warn(
                f"{KEY}.cache: {cache.hits or 'none'} of {cache.lookups} inputs came twice, augmentation makes each "
                "a new one: set cache=0."
            )

    def report(self) -> dict[str, float]:
        return {
            f"{self._prefix(i)}_{name}": value
            for i, metrics in enumerate(self.metrics)
            for name, value in metrics.items()
        }

    def _prefix(self, index: int) -> str:
        return "distill/teacher" if len(self.specs) == 1 else f"distill/teacher{index + 1}"


@contextmanager
def _as_evaluated(task: nn.Module) -> Iterator[None]:
    """Set only the task's own flag to eval: losses without label smoothing and padding rows."""
    was, task.training = task.training, False
    try:
        yield
    finally:
        task.training = was


def name_of(spec: Any) -> str:
    return "net" if hasattr(spec, "keys") else str(spec)
