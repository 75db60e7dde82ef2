"""Batches as a Trainer's steps get them, and one batch ahead on a second CUDA stream (`trainer.prefetch_to_device`)."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, TypeVar

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_LIGHTNINGS = [getattr(DataHooks, name) for name in HOOKS]
Hook = TypeVar("Hook", bound=Callable[..., Any])


class Transferred:
    """A loader's batches on a device, after the transfer hooks.

    The hooks are the data module's, or the LightningModule's if the data module overrides none, as in Lightning.

    Args:
        loader: one loader, or several, read as in Lightning: together in training, else one after another.
        data: the data module, or a LightningModule with loaders.
        stage: of the Trainer while hooks run, which may read `self.trainer.training`.
        device: None for the Trainer's device, or the CPU without a Trainer.
    """

    def __init__(self, loader: Any, data: Any, stage: RunningStage, device: torch.device | None = None) -> None:
        plain = not hasattr(data, HOOKS[0])  # an object with loaders only; a loader may be a list of batches
        data = LightningDataModule() if plain else data
        self.several = isinstance(loader, list | tuple | dict) and not plain
        self.loader, self.stage, trainer = loader, stage, trainer_of(data)
        self.device = device or (torch.device("cpu") if trainer is None else trainer.strategy.root_device)
        module = getattr(data, "reads_for", None) if trainer is None else getattr(trainer, "lightning_module", None)
        self.parts = [data] if module in (None, data) else [data, module]
        self.trainer = trainer or next((owner for part in self.parts if (owner := trainer_of(part)) is not None), None)

    def __iter__(self) -> Iterator[Any]:
        owners = (next((part for part in self.parts if is_overridden(name, part)), self.parts[0]) for name in HOOKS)
        before, move, after = (getattr(owner, name) for owner, name in zip(owners, HOOKS, strict=True))
        has_hooks = any(is_own(hook) for hook in (before, move, after))
        mode: Any = "max_size_cycle" if self.stage == RunningStage.TRAINING else "sequential"
        read: Any = CombinedLoader(self.loader, mode) if self.several else ((batch, 0, 0) for batch in self.loader)
        for batch, _, number in read:
            with self._at_stage() if has_hooks else nullcontext():
                result = after(move(before(batch, number), self.device, number), number)
            yield result

    @contextmanager
    def _at_stage(self) -> Iterator[None]:
        """Set the Trainer's stage, and the Trainer of parts that have none."""
        self.trainer = self.trainer or stand_in()
        state, without = self.trainer.state, [part for part in self.parts if trainer_of(part) is None]
        before, state.stage = state.stage, self.stage
        for part in without:
            part.trainer = self.trainer
        try:
            yield
        finally:
            state.stage = before
            for part in without:
                part.trainer = None


def stand_in() -> Trainer:
    """Return a Trainer for hooks that read `self.trainer`."""
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = log.level
    log.setLevel(logging.WARNING)  # it logs the machine's devices
    try:
        return Trainer(
            accelerator="cpu", devices=1, plugins=[LightningEnvironment()], enable_model_summary=False, **quiet
        )
    finally:
        log.setLevel(level)


def trainer_of(part: Any) -> Any:
    """Return the Trainer of a data module or a LightningModule, or None."""
    return part._trainer if isinstance(part, LightningModule) else part.trainer


def is_own(hook: Any) -> bool:
    """Return whether a hook may read the Trainer; Lightning's own and those marked `needs_no_trainer` do not."""
    function = getattr(hook, "__func__", hook)
    return not (getattr(function, "needs_no_trainer", False) or function in _LIGHTNINGS)


def needs_no_trainer(hook: Hook) -> Hook:
    """Mark a transfer hook that does not read the Trainer's stage."""
    hook.needs_no_trainer = True  # type: ignore[attr-defined]
    return hook


def train_batches(data: Any, device: torch.device | None = None) -> Transferred:
    """Return training batches of a data module, or of a LightningModule with loaders."""
    return Transferred(data.train_dataloader(), data, RunningStage.TRAINING, device)


def val_batches(data: Any, device: torch.device | None = None) -> Transferred:
    """Return validation batches of a new loader; the position of other loaders does not change."""
    if hasattr(data, "eval_loader"):
        batches: Transferred = data.eval_loader("val", device)
        return batches
    return Transferred(data.val_dataloader(), data, RunningStage.VALIDATING, device)


def eval_stage(split: str) -> RunningStage:
    """Return the stage in which a split is evaluated."""
    return RunningStage.VALIDATING if split == "val" else RunningStage.TESTING


KEY = "trainer.prefetch_to_device=true"


class SideStream:
    """Makes batches on another stream of the step's GPU; `moves` copies tensors to it."""

    def __init__(self, device: torch.device, moves: bool = True) -> None:
        self.device, self.moves = device, moves
        self._stream: Any = torch.cuda.Stream(device)

    def begin(self) -> None:
        """Make later work wait for the current work of the step's stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def start(self, batches: Iterator[Any]) -> tuple[Any, Any]:
        """Start the next batch, and return it and its event; raise StopIteration after the last."""
        with torch.cuda.stream(self._stream):
            batch = next(batches)
            if self.moves:  # tensors in tuples, lists and dicts; other objects are not searched
                batch = tree_map_only(Tensor, lambda part: part.to(self.device, non_blocking=True), batch)
            return batch, self._stream.record_event()

    def take(self, batch: Any, event: Any) -> None:
        """Make the step's stream wait for the event, and keep the batch's memory until it is done."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)
        for part in tree_leaves(batch):
            if isinstance(part, Tensor) and part.device.type == "cuda":
                part.record_stream(stream)  # the side allocated it, and would reuse its memory


def one_ahead(batches: Iterator[Any], side: SideStream) -> Iterator[Any]:
    """Yield each batch after starting the next; exceptions are raised at their batch's place."""

    def start() -> tuple[Any, Any] | Exception:
        try:
            return side.start(batches)
        except Exception as error:
            return error

    side.begin()
    ahead = start()
    while not isinstance(ahead, Exception):
        batch, event = ahead
        ahead = start()
        side.take(batch, event)
        yield batch
    if not isinstance(ahead, StopIteration):
        raise ahead


def go_ahead(loader: Any, trainer: Any, device: torch.device | None = None) -> None:
    """Prefetch a loader's batches if `trainer.prefetch_to_device` is set and the loader allows it.

    Loaders without `goes_ahead` draw from the run's generators, or have a position that is more than a number. "auto"
    leaves out batches so small that several are made at once (`chunk`): the gain is small, and a change of streams
    takes some microseconds. `device` None is the trainer's.
    """
    setting: bool | Literal["auto"] = getattr(trainer, "prefetch_to_device", False)
    if not setting:
        return
    device = device or trainer.strategy.root_device
    if device.type != "cuda" or (setting == "auto" and getattr(loader, "chunk", 1) > 1):
        return
    if getattr(loader, "goes_ahead", False):
        parts = [part for part in (trainer.lightning_module, trainer.datamodule) if part is not None]
        has_hooks = any(is_overridden(name, part) and is_own(getattr(part, name)) for part in parts for name in HOOKS)
        loader.side = SideStream(device, moves=not has_hooks)  # the user's hooks move the batches
    elif setting is True:
        rank_zero_warn(
            f"{KEY} has no effect on batches of {type(loader).__name__}: how they are made is not known, or one that "
            "is made early would change what a continued run draws."
        )


def tell_no_effect(setting: bool | Literal["auto"], device: torch.device) -> None:
    """Warn if prefetching is requested on a device without streams."""
    if setting is True and device.type != "cuda":
        rank_zero_warn(f"{KEY} has no effect: it is for NVIDIA GPUs, and this run computes on {device.type}.")
