"""A loss of the user's own: a callable `(outputs, targets) -> scalar`, or several by name, whose sum is trained on."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError, user_location

CALL = (TypeError, ValueError, RuntimeError, IndexError, NotImplementedError)  # what wrong shapes and types raise


class Weighted(nn.Module):
    """`weight` times a loss, which is a callable `(outputs, targets) -> scalar`."""

    @validated
    def __init__(self, weight: float, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        if not callable(loss):
            raise ArgumentError(f"loss={loss!r}: expected a callable (outputs, targets) -> scalar.")
        self.weight, self.loss = weight, loss

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.weight * self.loss(outputs, targets)


class OwnLoss:
    """The terms of a loss on the outputs' device, in their number format. No module of the task: what a loss holds,
    such as weights of classes, comes from the configuration and not from a checkpoint.

    Raises:
        ArgumentError: a term is no callable, or has parameters to train, which no optimizer would move.
    """

    def __init__(self, given: Any) -> None:
        self.terms: dict[str, Any] = dict(given.items()) if isinstance(given, Mapping) else {"loss": given}
        self._place: tuple[torch.device, torch.dtype] | None = None
        self._begun = False
        if not self.terms:
            raise ArgumentError("loss={}: expected a loss, or several by name.")
        for name, term in self.terms.items():
            key = f"loss.{name}" if isinstance(given, Mapping) else "loss"
            if not callable(term) or isinstance(term, type):
                raise ArgumentError(
                    f"{key}={named(term)}: expected a callable (outputs, targets) -> scalar, such as an object of "
                    "torch.nn.CrossEntropyLoss."
                )
            if isinstance(term, nn.Module) and any(p.requires_grad for p in term.parameters()):
                raise ArgumentError(
                    f"{key}={named(term)} has parameters of its own, which no optimizer moves and no checkpoint keeps: "
                    "freeze them, or make them a part of the net."
                )

    @property
    def modules(self) -> list[nn.Module]:
        """Every module among the terms, inner ones too."""
        return [part for term in self.terms.values() if isinstance(term, nn.Module) for part in term.modules()]

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The terms, each 0-dim.

        Raises:
            UserError: one raises or gives no scalar; or, in the first call with a gradient, none that is finite.
        """
        self._move(outputs)
        found = {name: self._term(name, outputs, targets) for name in self.terms}
        if not self._begun and torch.is_grad_enabled():
            self._begun = True
            for name, value in found.items():
                if not bool(torch.isfinite(value)):
                    raise UserError(
                        f"{self._key(name)} is {float(value)} at the first step, on outputs {shape(outputs)} from "
                        f"{float(outputs.min()):.4g} to {float(outputs.max()):.4g}: look at the loss, the targets and "
                        "the net's scale."
                    )
        return found

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Tries the terms on outputs like the net's and targets like the data's.

        Raises:
            UserError: one raises or gives no scalar, or none depends on the outputs.
        """
        with torch.enable_grad():
            outputs = outputs.detach().requires_grad_()
            self._move(outputs)
            found = {name: self._term(name, outputs, targets) for name in self.terms}
        if not any(value.requires_grad for value in found.values()):
            raise UserError(
                f"{self._key(next(iter(found)))} has no gradient with respect to the outputs: compute it from them, by "
                "torch functions, without detach(), item() or argmax()."
            )

    def divided(self) -> list[str]:
        """Names of the losses whose mean depends on how samples are divided among batches."""
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
        except CALL as error:
            raise UserError(
                f"{self._key(name)} does not take outputs {shape(outputs)} and targets {shape(targets)}: "
                f"{' '.join(str(error).split())[:300]}{user_location(error)}"
            ) from error
        if not isinstance(value, Tensor) or value.dim():
            what = f"a tensor {shape(value)}" if isinstance(value, Tensor) else f"{type(value).__name__}"
            raise UserError(f"{self._key(name)} gives {what}: expected a scalar, such as the mean over the batch.")
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
    """What a user knows a loss or a metric by."""
    if isinstance(part, (str, int, float, type(None))):
        return str(part)
    part = getattr(part, "func", part)  # of a node with _partial_
    kind = part if hasattr(part, "__name__") else type(part)
    return str(kind.__name__)


def shape(tensor: Tensor) -> str:
    """A tensor's shape and type in a sentence."""
    return f"[{', '.join(map(str, tensor.shape))}] of {str(tensor.dtype).removeprefix('torch.')}"
