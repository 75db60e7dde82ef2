"""Teachers of a student: opened from the configuration, or an average of the student itself."""

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lathe.callbacks.ema import MovingAverage
from lathe.compression.modes import copy_input
from lathe.compression.quantization.layers import quantizers
from lathe.compression.structure import apply_structure
from lathe.data.transfer import val_batches
from lathe.errors import ArgumentError, UserError, require
from lathe.measure.calls import Call, output_of, run
from lathe.measure.processes import processes
from lathe.measure.shards import whole

KEY = "compression.distill"
OpenRun = Callable[[str], nn.Module]


class Teachers:
    """Teachers that are not submodules, so that no checkpoint, hyper-parameter or DDP bucket has them.

    `teacher` is a run directory, "ema", {"net": net, "weights": path}, or a list. `weights` are those of the soft term
    (None: equal); `cache` MiB of their logits are cached.
    """

    def __init__(self, teacher: Any, weights: Sequence[float] | None, ema_decay: float, cache: float) -> None:
        several = isinstance(teacher, Sequence) and not isinstance(teacher, str)
        self.specs: list[Any] = list(teacher) if several else [teacher]
        require(bool(self.specs), f"{KEY}.teacher=[] names no teacher: give the directory of a finished run.")
        for spec in self.specs:
            require(
                isinstance(spec, str | Path)
                or (
                    isinstance(spec, Mapping) and set(spec) == {"net", "weights"} and isinstance(spec["net"], nn.Module)
                ),
                f"{KEY}.teacher={spec!r:.80}: give a finished run's directory, ema, or {{net: ..., weights: ...}}.",
            )
        require(len(self.specs) == 1 or "ema" not in self.specs, f"{KEY}.teacher={teacher}: ema teaches alone.")
        given = weights or [1.0] * len(self.specs)
        if len(given) != len(self.specs):
            raise ArgumentError(f"teacher_weights={weights}: give {len(self.specs)} numbers, one for each teacher.")
        if cache and "ema" in self.specs:
            raise ArgumentError(f"cache={cache} needs a teacher that does not change, unlike teacher=ema: set cache=0.")
        self.shares = [value / sum(given) for value in given]
        self.ema_decay = ema_decay
        self.cache = LogitCache(int(cache * 2**20)) if cache else None
        self.average: Average | None = None
        self.nets: list[nn.Module] = []
        self.metrics: list[dict[str, float]] = []  # of each teacher on the validation split
        self._dtype = torch.float32

    def open(self, open_run: OpenRun | None, student: nn.Module | None = None) -> None:
        """Open the teachers on the CPU, unless they are open; an average needs the `student`."""
        if self.specs == ["ema"]:
            if student is not None:
                self.average = Average(student, self.ema_decay)
                self.nets = [self.average.net]
        elif not self.nets:
            self.nets = [open_teacher(spec, open_run) for spec in self.specs]

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the teachers; an average keeps at least float32."""
        self._dtype = torch.float32 if self.average is not None else dtype
        for net in self.nets:
            net.to(device, self._dtype)

    def answers(self, x: Any) -> Tensor:
        """Return all teachers' logits for the net's input: [batch, teachers, ..., classes]."""
        return self._compute(x) if self.cache is None else self.cache.get(x, self._compute)

    @torch.no_grad()
    def _compute(self, x: Any) -> Tensor:
        answers = [cast(Tensor, output_of(run(net, self._cast(x)))) for net in self.nets]
        return answers[0].unsqueeze(1) if len(answers) == 1 else torch.stack(answers, dim=1)

    def _cast(self, x: Any) -> Any:
        if isinstance(x, Call):
            return x.map(self._cast)
        return x.to(self._dtype) if x.is_floating_point() else x

    def evaluate(self, trainer: Trainer, task: Any) -> None:
        """Evaluate the teachers on the validation split, over all ranks, and log the monitored metric."""
        monitored = str(task.monitor).partition("/")[2]
        for index, net in enumerate(self.nets):
            totals: list[Tensor] = []
            meters = None if task.meters is None else task.meters.fresh()
            precision = trainer.precision_plugin.forward_context()
            with torch.random.fork_rng(devices=[]), torch.no_grad(), _as_evaluated(task), precision:
                for batch in val_batches(trainer.datamodule):  # type: ignore[attr-defined]
                    answer = net(self._cast(batch[0]))
                    loss = torch.stack(list(task.losses(answer, batch).values())).sum()
                    totals.append(task.reduce(answer, batch, loss))
                    if meters is not None:
                        meters.update("val", *task.scored(answer, batch))
            own = {} if meters is None else meters.take("val", trainer)
            means = {name.partition("/")[2]: value for name, value in task._means("val", sum(totals)).items()}
            self.metrics.append({**means, **own})
            task.write({f"{self._prefix(index)}_{monitored}": self.metrics[-1][monitored]})

    def compare(self, best: float, metric: str, lower: bool) -> None:
        """Warn if the student's best value of a metric is as good as the best teacher's."""
        theirs = [metrics[metric] for metrics in self.metrics if metric in metrics]
        if theirs and (best <= min(theirs) if lower else best >= max(theirs)):
            rank_zero_warn(
                f"{KEY}.teacher={', '.join(map(name_of, self.specs))} is no better than its student: val/{metric} is "
                f"{(min if lower else max)(theirs):.4g} of the teacher and {best:.4g} of the student."
            )

    def report(self) -> dict[str, float]:
        return {
            f"{self._prefix(i)}_{name}": value
            for i, metrics in enumerate(self.metrics)
            for name, value in metrics.items()
        }

    def _prefix(self, index: int) -> str:
        return "distill/teacher" if len(self.specs) == 1 else f"distill/teacher{index + 1}"


def name_of(spec: Any) -> str:
    """Return a teacher's name in messages."""
    return "net" if isinstance(spec, Mapping) else str(spec)


@contextmanager
def _as_evaluated(task: nn.Module) -> Iterator[None]:
    """Set only the task's own flag to eval: losses without label smoothing and padding rows."""
    was, task.training = task.training, False
    try:
        yield
    finally:
        task.training = was


def open_teacher(spec: Any, open_run: OpenRun | None) -> nn.Module:
    """Return the net of a run directory or of {"net", "weights"}, frozen in eval mode, on the CPU."""
    if isinstance(spec, Mapping):
        net: nn.Module = spec["net"]
        load_weights(net, str(spec["weights"]))
        return frozen(net)
    if open_run is None:
        raise UserError(f"{KEY}.teacher={spec}: set the callback's open_run, or give a net with its weights.")
    return frozen(open_run(str(spec)))


def frozen(net: nn.Module) -> nn.Module:
    """Freeze a net in eval mode; it gets copies of its inputs."""
    net.register_forward_pre_hook(copy_input)
    return net.eval().requires_grad_(False)


def load_weights(net: nn.Module, path: str) -> None:
    """Load a checkpoint, or a state dict that torch.save has written, after its changes of structure."""
    key = f"{KEY}.teacher.weights={path}"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or malicious file can raise nearly anything
        raise UserError(f"{key} can't be read ({' '.join(str(error).split())[:80]}): give a checkpoint.") from error
    weights: Any = state.get("state_dict", state) if isinstance(state, dict) else {}
    tensors = isinstance(weights, dict) and all(isinstance(one, Tensor) and not one.is_meta for one in weights.values())
    require(bool(weights) and tensors, f"{key} does not hold plain tensors: give a checkpoint, or a state dict.")
    apply_structure(net, state.get("structure", {}))
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{key} does not fit {KEY}.teacher.net ({reason}).") from error


class Average:
    """A teacher that is the moving average of its student (Tarvainen and Valpola 2017, arXiv:1703.01780).

    After each optimizer step, `average = decay * average + (1 - decay) * weights`; update t uses min(decay, (1 + t) /
    (10 + t)). Create it before a strategy shards the net: every rank holds the whole average, in at least float32.
    Buffers are averaged too, and are rank 0's. Fake quantization is off in the teacher.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.net = frozen(copy.deepcopy(net))
        for quantizer in quantizers(self.net):
            quantizer.switch(enabled=False)
        self._average = MovingAverage(decay)
        self._live: list[Tensor] = []
        self._buffers: list[int] = []

    def tensors(self) -> dict[str, Tensor]:
        """Return the averaged tensors by name: all of floating point except the quantizers'."""
        return {
            name: tensor
            for name, tensor in self.net.state_dict(keep_vars=True).items()
            if tensor.is_floating_point() and "quantizer" not in name
        }

    def bind(self, student: nn.Module) -> None:
        """Find the student's tensors, in each epoch: another callback may have replaced some.

        Raises:
            UserError: a rank does not hold whole parameters (deepspeed_3), or a shape has changed.
        """
        live, own = student.state_dict(keep_vars=True), self.tensors()
        names = [name for name in own if name in live]
        require(
            not any(hasattr(live[name], "ds_id") for name in names),
            f"{KEY}.teacher=ema needs whole weights, and deepspeed_3 has parts: use fsdp, deepspeed_2 or ddp.",
        )
        changed = [name for name in names if live[name].shape != own[name].shape]
        require(
            not changed,
            f"{KEY}.teacher=ema can't follow {changed}, whose shapes another method changes: give a finished run.",
        )
        self._live = [live[name] for name in names]
        self._average.tensors = [own[name].detach() for name in names]
        self._buffers = [i for i, tensor in enumerate(self._live) if not isinstance(tensor, nn.Parameter)]

    @torch.no_grad()
    def update(self) -> None:
        """Update the average after an optimizer step. A collective for sharded parameters and for buffers."""
        live = [whole(tensor).to(average) for tensor, average in zip(self._live, self._average.tensors, strict=True)]
        if self._buffers and processes() > 1:
            flat = torch.cat([live[i].flatten() for i in self._buffers])
            torch.distributed.broadcast(flat, src=0)
            parts = flat.split([live[i].numel() for i in self._buffers])
            for i, part in zip(self._buffers, parts, strict=True):
                live[i] = part.view(live[i].shape)
        self._average.update(live)

    def state_dict(self) -> dict[str, Any]:
        average = {name: tensor.detach().clone() for name, tensor in self.tensors().items()}
        return {"updates": self._average.updates, "average": average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._average.updates = state["updates"]
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.detach().copy_(state["average"][name])


class LogitCache:
    """Logits by input, at most `limit` bytes of them; the oldest are dropped first.

    The key of a row is a hash of its content, so that crops of a sample differ.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.rows: dict[bytes, Tensor] = {}
        self.lookups = self.hits = self.saved = 0  # rows requested, cached rows, and rows that were not computed
        self._warned = False

    def get(self, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `compute(x)` [batch, ...], cached or computed; one new row computes the whole batch.

        Waits for the device.
        """
        content = x.detach().cpu().contiguous().view(len(x), -1).view(torch.uint8).numpy()
        keys = [hashlib.blake2b(row, digest_size=16).digest() for row in content]
        self.lookups += len(keys)
        known = sum(key in self.rows for key in keys)
        self.hits += known
        if known == len(keys):
            self.saved += known
            return torch.stack([self.rows[key] for key in keys])
        logits = compute(x)
        size = logits[0].numel() * logits.element_size()
        for key, row in zip(keys, logits.detach(), strict=True):
            self.rows.setdefault(key, row.clone())  # a view would keep the memory of the whole batch
        while len(self.rows) * size > self.limit:
            del self.rows[next(iter(self.rows))]
        return logits

    def warn_if_useless(self) -> None:
        """Warn once if the cache has saved nothing."""
        if self.lookups and not self.saved and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"{KEY}.cache answered no batch: {self.hits or 'none'} of {self.lookups} inputs came twice, and it has "
                f"{len(self.rows)}. Give it more MiB, or set cache=0 with augmentation."
            )
