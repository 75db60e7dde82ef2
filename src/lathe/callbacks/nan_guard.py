"""Stop at the first number that is not finite, and name its tensor."""

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from lathe.callbacks.module_access import net_of, on_any_rank, task_of
from lathe.config.metric_names import split_of
from lathe.config.types import Count
from lathe.config.validation import validated
from lathe.errors import UserError, require
from lathe.measure.flops import net_input
from lathe.measure.processes import everyones
from lathe.measure.shards import local

ROWS = 5  # rows of a bad batch that are named


def names_of(trainer: Trainer, split: str, loader: Any, batch: int) -> Callable[[list[int]], str]:
    """Return a function of rows of this process's batch: their names, if its loader and data module know them."""

    def names(rows: list[int]) -> str:
        name_of = getattr(getattr(trainer, "datamodule", None), "name_of", None)
        if name_of is None or not hasattr(loader, "numbers"):
            return ""
        samples = loader.numbers(batch)
        names_found = [name_of(split, samples[row]) for row in rows if row < len(samples)]
        return ", ".join(name for name in names_found if name is not None)

    return names


def bad_batch(trainer: Trainer) -> str:
    """Read this rank's validation batches again; describe the first one that is not finite, or return ""."""
    loaders: Any = trainer.val_dataloaders
    for loader, count in zip(
        loaders if isinstance(loaders, list) else [loaders], trainer.num_val_batches, strict=False
    ):
        for number, batch in enumerate(loader):
            if number >= count:
                break
            if fault := bad_rows(batch, names_of(trainer, "val", loader, number)):
                return f"batch {number} of validation {fault}"
    return ""


def bad_rows(batch: Any, names: Callable[[list[int]], str], infinite: bool = False) -> str:
    """Describe the rows of a batch that are not finite; "" if all are.

    Without `infinite`, only the first tensor may not hold inf: the net's input. Masks hold -inf.
    """
    for number, (path, tensor) in enumerate(tree_flatten_with_path(batch)[0]):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            continue
        bad = tensor.isnan() if number and not infinite else ~tensor.isfinite()
        if bad.any():
            rows = bad.reshape(len(bad), -1).any(1).nonzero().flatten().tolist() if bad.dim() else []
            listed = ", ".join(map(str, rows[:ROWS])) + (f" and {len(rows) - ROWS} more" if len(rows) > ROWS else "")
            where = f", in {'row' if len(rows) == 1 else 'rows'} {listed} of {len(bad)}" if rows else ""
            called = names(rows[:ROWS]) if rows else ""
            return f"holds {kind_of(tensor)} (batch{keystr(path)}{where}{called and f': {called}'})"
    return ""


def kind_of(tensor: Tensor) -> str:
    return "nan" if tensor.isnan().any() else "inf"


class NanGuard(Callback):
    """Raise UserError with the optimizer step and the first tensor that is nan or inf.

    A single process on a CPU checks every loss before backward, so the weights are still good, and runs the forward
    pass again to name the first module with a bad output. Otherwise reading a number makes the host wait, so losses are
    stored and read every `every_n_steps` optimizer steps; the reported step is exact either way. Gradients are checked
    at those steps too, before the optimizer uses them: a checkpoint written every multiple of `every_n_steps` never
    holds a bad weight. Parameters (and buffers, for nan only: a mask may hold -inf) are checked before each validation
    and at the end.

    Ranks exchange their findings at the same steps and stop together with the same message. Each checks what it holds:
    the whole net, shards, or some blocks. From stage 2 on, DeepSpeed's engine does not expose gradients; a bad one is
    then found in the parameters or in the next loss. Under a scaler, inf gradients and inf float16 losses are not
    errors until its scale is below 2^-8.
    """

    @validated
    def __init__(self, every_n_steps: Count = 50) -> None:
        self.every_n_steps = every_n_steps
        self._losses: list[Tensor] = []
        self._ends: list[int] = []  # for each optimizer step since the last reading, the number of losses up to it
        self._batch: Any = None
        self._batch_idx = 0
        self._warned = False  # a validation that is not finite was reported
        self._at_once = False

    every_step = ("on_train_batch_start", "on_before_backward", "on_before_optimizer_step")

    def skippable_steps(self, trainer: Trainer) -> float:
        """Return inf: the hooks that run at each step are in `every_step`."""
        return math.inf

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._losses, self._ends = [], []
        self._at_once = trainer.world_size == 1 and trainer.strategy.root_device.type == "cpu"
        faults = [bad for bad in everyones(_first_bad_state(net_of(pl_module))) if bad]
        require(
            not faults,
            f"Training can't begin: {faults[0] if faults else ''} before the first step: go on from another "
            "checkpoint, or start from other weights.",
        )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch, self._batch_idx = batch, batch_idx

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if not self._at_once:
            self._losses.append(loss.detach())
        elif not math.isfinite(loss.item()):
            self._losses = [loss.detach()]
            self._look(trainer, pl_module, gradients=False)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._ends.append(len(self._losses))
        if len(self._ends) >= self.every_n_steps:
            self._look(trainer, pl_module, gradients=True)

    def on_whole_step(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Act for the two hooks above if a step is one compiled function, which has updated the weights."""
        self._losses.append(loss)
        self._ends.append(len(self._losses))
        if len(self._ends) >= self.every_n_steps or (self._at_once and not math.isfinite(loss.item())):
            self._look(trainer, pl_module, gradients=True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batch = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._look(trainer, pl_module, gradients=False, state=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn of the first validation whose metrics are not finite, with its bad rows; do not stop."""
        if self._warned or trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        wild = everyones([name for name, value in trainer.callback_metrics.items() if not _finite(value)])
        wild = [[name for name in names if split_of(name) == "val"] for names in wild]
        if any(wild):
            self._warned = True
            faults = [fault for fault in everyones(bad_batch(trainer)) if fault]
            why = faults[0] if faults else "its batches are finite, so the net or the metric makes it"
            names = ", ".join(sorted({name for names in wild for name in names}))
            rank_zero_warn(f"{names} is not finite after step {trainer.global_step}: {why}.")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(trainer, pl_module, gradients=False, state=True)

    def _look(self, trainer: Trainer, pl_module: LightningModule, gradients: bool, state: bool = False) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        # inside a step, that step is not counted yet
        now = trainer.global_step + (0 if state else 1)
        net = net_of(pl_module)
        scaled = str(trainer.precision) == "16-mixed"  # by a GradScaler, or inside an engine
        bad_loss = self._first_bad_loss(scaled)
        suspect = bad_loss is not None
        if gradients and not scaled and (parts := list(_gradients(net).values())):
            # in one read; unlike a sum of squares, the largest magnitude can't overflow
            norms = torch.stack([norm.float() for norm in torch._foreach_norm(parts, math.inf)])
            suspect = suspect or not bool(norms.isfinite().all())
        elif gradients and scaler is not None:
            suspect = suspect or scaler.get_scale() < 2**-8
        if state:
            suspect = suspect or bool(_first_bad_state(net))
        if on_any_rank(trainer, suspect):
            # before the optimizer step, the current step is in `_ends` but not complete
            complete = len(self._ends) - gradients
            self._stop(trainer, net, now, trainer.global_step - complete + 1, bad_loss)
        self._losses.clear()
        self._ends.clear()

    def _first_bad_loss(self, scaled: bool) -> tuple[int, str] | None:
        """Return the first bad loss: optimizer steps since the last check, and "nan" or "inf"."""
        if not self._losses:
            return None
        values = torch.stack([loss.float() for loss in self._losses]).tolist()
        for i, (value, loss) in enumerate(zip(values, self._losses, strict=True)):
            overflow = scaled and math.isinf(value) and loss.dtype is torch.float16
            if not math.isfinite(value) and not overflow:
                return sum(end <= i for end in self._ends), "nan" if math.isnan(value) else "inf"
        return None

    def _stop(
        self, trainer: Trainer, net: nn.Module, now: int, first: int, bad_loss: tuple[int, str] | None
    ) -> NoReturn:
        """Raise the error; `now` is the current or last step, `first` the one after the last check."""
        step = math.inf if bad_loss is None else first + bad_loss[0]
        gradient = next((f"{n} is {kind_of(g)}" for n, g in _gradients(net).items() if not _finite(g)), "")
        findings = everyones((step, "" if bad_loss is None else bad_loss[1], gradient, _first_bad_state(net)))
        # of ranks with a bad loss in the same step (all, if they share a batch), one that can name a tensor
        rank = min(range(len(findings)), key=lambda i: (findings[i][0], not findings[i][3], not findings[i][2]))
        step, value, gradient, state = findings[rank]
        loss = f"in optimizer step {step} the loss is {value}" + (f" on process {rank}" if len(findings) > 1 else "")
        if step == math.inf and state:
            what = f"after optimizer step {trainer.global_step} {state}"
        elif step == math.inf and gradient:
            what = f"in optimizer step {now} the gradient of {gradient} although the loss is finite"
        elif step == math.inf:
            what = f"in optimizer step {now} the gradients are not finite at any loss scale"
        elif step == now and state.startswith("parameter"):  # a buffer may be of this step's forward pass
            what = f"{loss} because {state} since the step before"
        elif step == now and self._batch is not None:
            what = self._blame(trainer, net, loss, rank)
        else:
            what = (
                f"{loss}, read at step {now} when the weights had followed (callbacks.nan_guard.every_n_steps=1 names "
                "the module, or the rows of the batch)"
            )
        rate = "optimizer.lr" if task_of(net) is net else "the module's learning rate"
        raise UserError(
            f"Training stopped: {what}; lower {rate}, set trainer.gradient_clip_val, or use precision=32-true."
        )

    def _blame(self, trainer: Trainer, net: nn.Module, loss: str, rank: int) -> str:
        """Return what made the loss of `rank` in this step; raise UserError if its batch did. A collective."""

        def check_rows(infinite: bool) -> None:
            names = names_of(trainer, "train", trainer.train_dataloader, self._batch_idx)
            fault = everyones(bad_rows(self._batch, names, infinite))[rank]
            require(
                not fault, f"Training stopped: {loss}: the batch itself {fault}; drop or fill such rows in the data."
            )

        check_rows(infinite=False)
        parts = everyones([name for name, _ in net.named_parameters()])
        if any(names != parts[0] for names in parts):
            return f"{loss}, and each process has a part of the net only"
        if task_of(net) is not net:  # a user's own module, which may train with something other than its forward
            return f"{loss}, made in the training_step of {type(net).__name__} from finite weights"
        # all ranks run it, not only the one with the bad loss: the net may contain collectives
        culprit = everyones(_first_bad_output(trainer, net, net_input(self._batch)))[rank]
        if not culprit:
            check_rows(infinite=True)
        return f"{loss}: {culprit or 'the output of the net is finite, so the loss function made it'}"


def _first_bad_output(trainer: Trainer, net: nn.Module, x: Tensor) -> str:
    """Run the forward pass again and name the first module whose output is not finite; "" if none."""
    bad: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not bad and isinstance(output, Tensor) and not _finite(local(output)):
                bad.append(
                    f"the first module with {kind_of(local(output))} in its output is {name} ({type(module).__name__})"
                )

        return hook

    handles = [module.register_forward_hook(watch(name or "the net")) for name, module in net.named_modules()]
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), trainer.precision_plugin.forward_context():
            net(x)
    finally:
        for handle in handles:
            handle.remove()
    return bad[0] if bad else ""


def _gradients(net: nn.Module) -> dict[str, Tensor]:
    """Return this rank's share of each gradient, without empty ones."""
    parts = {name: local(p.grad) for name, p in net.named_parameters() if p.grad is not None}
    return {name: g._values() if g.is_sparse else g for name, g in parts.items() if g.numel()}


def _first_bad_state(net: nn.Module) -> str:
    for name, parameter in net.named_parameters():
        if not _finite(part := local(parameter)):
            return f"parameter {name} is {kind_of(part)}"
    for name, buffer in net.named_buffers():
        if local(buffer).isnan().any():
            return f"buffer {name} is nan"
    return ""


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())
