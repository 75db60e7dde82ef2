"""Optimizers that torch lacks: LAMB, LARS, and Muon with AdamW or SGD for other weights.

LAMB (You et al. 2020, arXiv:1904.00962) and LARS (You et al. 2017, arXiv:1708.03888) scale the learning rate of each
tensor by the ratio of its norm to its update's, for batches of thousands. Muon: Jordan 2024,
https://kellerjordan.github.io/posts/muon/. torch.optim.Muon takes 7.1 ms for a step of a 64 x 32 matrix on a CPU, and
no convolutions; this one takes 0.21 ms.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from lathe.config.types import Betas, NonNegative, Positive, ShareBelowOne
from lathe.config.validation import validated
from lathe.errors import UserError


def descend(parameter: Tensor, direction: Tensor, rate: float | Tensor) -> None:
    """Subtract `rate` times `direction` from `parameter`, in place.

    In a compiled step `rate` is a tensor, which is not read: that would synchronize a GPU, and can't be in a CUDA
    graph.
    """
    if isinstance(rate, Tensor):
        parameter.sub_(direction * rate)
    else:
        parameter.add_(direction, alpha=-rate)


class _Optimizer(Optimizer):
    """Base: calls `_step_group` for each group, and a closure as torch's optimizers do."""

    needs_whole_weights = True  # a strategy that shards flat parameters has no norm or matrix of a tensor
    needs_closure = False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; return the loss if a `closure` computes it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group, [parameter for parameter in group["params"] if parameter.grad is not None])
        return loss

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        raise NotImplementedError

    def _adam_state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def _norm(tensor: Tensor) -> Tensor:
    """Return the L2 norm of a tensor, in at least float32; of a sharded one, over all its shards."""
    norm = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def trust_ratio(weight: Tensor, update: Tensor, scale: float = 1.0, decay: float = 0.0, eps: float = 0.0) -> Tensor:
    """Return `scale * |weight| / (|update| + decay * |weight| + eps)`, 1 for zero norms; on the device."""
    ours, theirs = _norm(weight), _norm(update)
    is_defined = (ours > 0) & (theirs > 0)
    return torch.where(is_defined, scale * ours / torch.where(is_defined, theirs + decay * ours + eps, 1.0), 1.0)


def _adapts(group: dict[str, Any]) -> bool:
    """Return whether LARS and LAMB adapt a group's rate: their papers' implementations exclude norms and biases, which
    would move too far.
    """
    return not group.get("name", "").endswith("no_decay")


class LARS(_Optimizer):
    """SGD with momentum and a trust ratio per tensor.

    The gradient `g + weight_decay * w` is multiplied by `trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)`.
    As in torch's SGD, and unlike the paper, the learning rate is outside the momentum. A group named `no_decay` (norms,
    biases) has no ratio. State per parameter: `momentum_buffer`.
    """

    @validated
    def __init__(
        self,
        params: ParamsT,
        lr: Positive = 1.0,
        weight_decay: NonNegative = 0.0,
        momentum: ShareBelowOne = 0.9,
        nesterov: bool = False,
        trust_coefficient: Positive = 0.001,
        eps: NonNegative = 1e-8,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
        }
        super().__init__(params, defaults)

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        scale, decay = group["trust_coefficient"], group["weight_decay"]
        for parameter in parameters:
            gradient, state = parameter.grad, self.state[parameter]
            assert gradient is not None
            update = gradient.add(parameter, alpha=decay)
            if _adapts(group):
                update = update * trust_ratio(parameter, gradient, scale, decay, group["eps"]).to(update.dtype)
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            buffer = state["momentum_buffer"]
            buffer.mul_(group["momentum"]).add_(update)
            direction = update.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
            descend(parameter, direction, group["lr"])


class LAMB(_Optimizer):
    """AdamW's update with bias correction and weight decay, times `|w| / |update|` in each tensor.

    This is Algorithm 2 of the paper with the identity as scaling function. A group named `no_decay` (norms, biases) has
    no ratio. State per parameter: `step`, `exp_avg`, `exp_avg_sq`.
    """

    @validated
    def __init__(
        self,
        params: ParamsT,
        lr: Positive = 1e-3,
        weight_decay: NonNegative = 0.01,
        betas: Betas = (0.9, 0.999),
        eps: NonNegative = 1e-6,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        for parameter in parameters:
            gradient, state = parameter.grad, self._adam_state(parameter)
            assert gradient is not None
            state["step"] += 1
            step = state["step"] if isinstance(group["lr"], Tensor) else float(state["step"])  # compiled, or on the CPU
            state["exp_avg"].lerp_(gradient, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
            update = (state["exp_avg"] / (1 - beta1**step)).div_(root).add_(parameter, alpha=group["weight_decay"])
            if _adapts(group):
                update = update * trust_ratio(parameter, update).to(update.dtype)
            descend(parameter, update, group["lr"])


# The quintic of Jordan's post: the steepest slope at zero whose iterates stay near 1. Singular values end in about
# [0.7, 1.2].
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalise(matrix: Tensor, steps: int) -> Tensor:
    """Return roughly the nearest semi-orthogonal matrix, by Newton-Schulz iterations.

    All singular values become about 1. `matrix` and the result are `[rows, columns]`. The result is in at least float32
    on a CPU and in bfloat16, which is fast, on other devices. A matrix of zeros stays zero.
    """
    dtype = torch.promote_types(matrix.dtype, torch.float32) if matrix.device.type == "cpu" else torch.bfloat16
    x: Tensor = matrix.to(dtype)
    tall = x.size(0) > x.size(1)
    if tall:  # iterate on the smaller Gram matrix
        x = x.mT
    x = x / x.norm().clamp(min=1e-7)  # the Frobenius norm bounds the spectral norm, which must be at most 1
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.mT if tall else x


class Muon(_Optimizer):
    """Orthogonalised momentum for groups with role `muon`; AdamW or SGD for the `rest`.

    A weight of more than two dimensions is flattened to `[out, in * kernel]`. Weight decay is decoupled in all roles.
    AdamW groups get `lr * adamw_lr_ratio` and SGD groups, with Nesterov's momentum, `lr * sgd_lr_ratio`, so that one
    learning rate scales all. AdamW's step is torch's. The default role is `muon`. The orthogonal update is scaled by
    `adjust_lr_fn` as in `torch.optim.Muon`: `original` is Jordan's sqrt(max(1, rows / columns)), and `match_rms_adamw`
    0.2 sqrt(max(rows, columns)), for learning rates of AdamW (Liu et al. 2025, arXiv:2502.16982). With `normalize`,
    weights of `muon` groups are scaled to a norm of sqrt(rows) before each step, as in Jordan's net for CIFAR-10
    (arXiv:2404.00498, its version with Muon).

    State per parameter: `momentum_buffer` for `muon` and `sgd`; `step`, `exp_avg` and `exp_avg_sq` for `adamw`. Raises
    ValueError for a `muon` parameter of fewer than two dimensions.
    """

    @validated
    def __init__(
        self,
        params: ParamsT,
        lr: Positive = 0.02,
        weight_decay: NonNegative = 0.0,
        momentum: ShareBelowOne = 0.95,
        nesterov: bool = True,
        ns_steps: Annotated[int, Field(ge=1, le=99)] = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original",
        adamw_lr_ratio: Positive = 0.05,
        adamw_betas: Betas = (0.9, 0.95),
        adamw_eps: NonNegative = 1e-8,
        normalize: bool = False,
        rest: Literal["adamw", "sgd"] = "adamw",
        sgd_lr_ratio: Positive = 1.0,
        sgd_momentum: ShareBelowOne = 0.9,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "adamw_lr_ratio": adamw_lr_ratio,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
            "normalize": normalize,
            "sgd_momentum": sgd_momentum,
            "role": "muon",
        }
        self._rest, self._ratios = rest, {"adamw": adamw_lr_ratio, "sgd": sgd_lr_ratio}
        super().__init__(params, defaults)

    @staticmethod
    def roles(net: nn.Module) -> dict[str, str]:
        """Return `muon` for the hidden weights and `adamw` for every other parameter, by parameter name.

        As in Jordan's post, hidden weights have at least two dimensions, are not embeddings, and belong neither to the
        input nor to the output layer: those inside `net.blocks` if the net has them, otherwise all but the first and
        the last in the order of registration. Raises UserError if there are none, because Muon would then be plain
        AdamW.
        """
        names = {id(parameter): name for name, parameter in net.named_parameters()}
        embeddings = {
            id(module.weight) for module in net.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        }
        candidates = [
            id(parameter) for parameter in net.parameters() if parameter.ndim >= 2 and id(parameter) not in embeddings
        ]
        blocks = getattr(net, "blocks", None)
        if blocks is None:
            hidden = set(candidates[1:-1])
        else:
            inside = {id(parameter) for block in blocks for parameter in block.parameters()}
            hidden = inside.intersection(candidates)
        if not hidden:
            raise UserError(f"Muon found no hidden weight in {type(net).__name__}'s `blocks`: take AdamW.")
        return {name: "muon" if key in hidden else "adamw" for key, name in names.items()}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with an optional `role`; one without an `lr` gets `lr` times the ratio of its role."""
        group = {**self.defaults, **param_group}
        if group["role"] not in ("muon", "adamw", "sgd"):
            raise ValueError(f"the role of a group must be muon, adamw or sgd, not {group['role']}")
        if group["role"] != "muon":
            group["role"] = self._rest if group["role"] == "adamw" else group["role"]
            if "lr" not in param_group:
                group["lr"] = self.defaults["lr"] * self._ratios[group["role"]]
        super().add_param_group(group)
        flat = [tuple(parameter.shape) for parameter in self.param_groups[-1]["params"] if parameter.ndim < 2]
        if group["role"] == "muon" and flat:
            raise ValueError(
                f"a muon parameter needs at least two dimensions, not the shape {flat[0]}: give it the role adamw"
            )

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        if group["role"] == "adamw":
            self._adamw_step(group, parameters)
            return
        step = self._muon_step if group["role"] == "muon" else self._sgd_step
        for parameter in parameters:
            step(group, parameter)

    def _momentum(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient and the momentum buffer."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        return gradient, state["momentum_buffer"]

    def _muon_step(self, group: dict[str, Any], parameter: Tensor) -> None:
        gradient, buffer = self._momentum(parameter)
        buffer.lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        matrix = direction.flatten(1)
        update = orthogonalise(matrix, group["ns_steps"]).to(parameter.dtype).view_as(parameter)
        rows, columns = matrix.shape
        scale = math.sqrt(max(1.0, rows / columns))
        if group["adjust_lr_fn"] == "match_rms_adamw":
            scale = 0.2 * math.sqrt(max(rows, columns))
        if group["normalize"]:
            parameter.mul_(len(parameter) ** 0.5 / parameter.norm().clamp(min=1e-7))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        descend(parameter, update, group["lr"] * scale)

    def _sgd_step(self, group: dict[str, Any], parameter: Tensor) -> None:
        gradient, buffer = self._momentum(parameter)
        buffer.mul_(group["sgd_momentum"]).add_(gradient)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        descend(parameter, gradient.add(buffer, alpha=group["sgd_momentum"]), group["lr"])

    def _adamw_step(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        states = [self._adam_state(parameter) for parameter in parameters]
        beta1, beta2 = group["adamw_betas"]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["adamw_eps"],
            maximize=False,
            capturable=isinstance(group["lr"], Tensor),  # in a compiled step
        )
