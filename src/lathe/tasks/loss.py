"""A user's loss: a callable `(outputs, targets) -> scalar`, or several by name, whose sum is trained on."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError, user_location

CALL_ERRORS = (TypeError, ValueError, RuntimeError, IndexError, NotImplementedError)  # of wrong shapes and types


class Weighted(nn.Module):
    """`weight` times a loss, which is a callable `(outputs, targets) -> scalar`."""

    @validated
    def __init__(self, weight: float, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight, self.loss = weight, loss

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.weight * self.loss(outputs, targets)


class OwnLoss:
    """The terms of a loss, on the outputs' device and in their dtype. It is not a submodule of the task: what a loss
    holds, such as class weights, comes from the configuration and not from a checkpoint.

    Raises:
        ArgumentError: a term is not callable, or has trainable parameters, which no optimizer would update.
    """

    def __init__(self, given: Any) -> None:
        self.terms: dict[str, Any] = dict(given.items()) if isinstance(given, Mapping) else {"loss": given}
        self._place: tuple[torch.device, torch.dtype] | None = None
        self._checked = False
        if not self.terms:
            raise ArgumentError("loss={}: expected a loss, or several by name.")
        for name, term in self.terms.items():
            key = f"loss.{name}" if isinstance(given, Mapping) else "loss"
            if not callable(term) or isinstance(term, type):
                raise ArgumentError(
                    f"{key}={named(term)}: expected a callable (outputs, targets) -> scalar, such as "
                    "{_target_: torch.nn.CrossEntropyLoss}."
                )
            if isinstance(term, nn.Module) and any(p.requires_grad for p in term.parameters()):
                raise ArgumentError(
                    f"{key}={named(term)} has trainable parameters, which no optimizer updates: freeze them, or put "
                    "them into the net."
                )

    @property
    def modules(self) -> list[nn.Module]:
        """Return every module among the terms, inner ones too."""
        return [part for term in self.terms.values() if isinstance(term, nn.Module) for part in term.modules()]

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the terms, each 0-dim.

        Raises:
            UserError: one raises or does not return a scalar, or is not finite in the first call with a gradient.
        """
        self._move(outputs)
        found = {name: self._term(name, outputs, targets) for name in self.terms}
        if not self._checked and torch.is_grad_enabled():
            self._checked = True
            for name, value in found.items():
                if not bool(torch.isfinite(value)):
                    raise UserError(
                        f"{self._key(name)} is {float(value)} at the first step, for outputs {shape(outputs)} from "
                        f"{float(outputs.min()):.4g} to {float(outputs.max()):.4g}. Check the loss, the targets and "
                        "the scale of the net's outputs."
                    )
        return found

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Try the terms on outputs like the net's and targets like the data's.

        Raises:
            UserError: one raises or does not return a scalar, or none depends on the outputs.
        """
        with torch.enable_grad():
            outputs = outputs.detach().requires_grad_()
            self._move(outputs)
            found = {name: self._term(name, outputs, targets) for name in self.terms}
        if not any(value.requires_grad for value in found.values()):
            raise UserError(
                f"{self._key(next(iter(found)))} has no gradient with respect to the outputs: compute it without "
                "detach(), item() or argmax()."
            )

    def divided(self) -> list[str]:
        """Return the names of losses whose mean depends on how samples are divided among batches."""
        return [
            type(part).__name__
            for part in self.modules
            if isinstance(part, (nn.CrossEntropyLoss, nn.NLLLoss))
            and part.weight is not None
            and part.reduction == "mean"
        ]

    def _term(self, name: str, outputs: Tensor, targets: Tensor) -> Tensor:
        try:
            value = self.terms[name](outputs, targets)
        except torch.OutOfMemoryError:
            raise
        except CALL_ERRORS as error:
            raise UserError(
                f"{self._key(name)} does not accept outputs {shape(outputs)} and targets {shape(targets)}: "
                f"{' '.join(str(error).split())[:300]}{user_location(error)}"
            ) from error
        if not isinstance(value, Tensor) or value.dim():
            what = f"a tensor {shape(value)}" if isinstance(value, Tensor) else f"{type(value).__name__}"
            raise UserError(f"{self._key(name)} returns {what}: expected a scalar, such as the mean over the batch.")
        return value

    def _key(self, name: str) -> str:
        return f"task.loss{'' if name == 'loss' else f'.{name}'}={named(self.terms[name])}"

    def _move(self, outputs: Tensor) -> None:
        place = (outputs.device, outputs.dtype)
        if place != self._place:
            self._place = place
            for term in self.terms.values():
                if isinstance(term, nn.Module):
                    term.to(*place)


def named(part: Any) -> str:
    """Return a loss or a metric as a user writes it."""
    if isinstance(part, (str, int, float, type(None))):
        return str(part)
    part = getattr(part, "func", part)  # of a node with _partial_
    kind = part if hasattr(part, "__name__") else type(part)
    return str(kind.__name__)


def shape(tensor: Tensor) -> str:
    """Return a tensor's shape and dtype as text."""
    return f"[{', '.join(map(str, tensor.shape))}] of {str(tensor.dtype).removeprefix('torch.')}"
