"""Fake quantization of one tensor, with straight-through gradients and with learned step sizes (LSQ)."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

TrainingObserver = Literal["minmax", "moving_average", "percentile"]
SAMPLE = 16384  # values of a batch for a percentile in training
TINY = 1e-9  # smallest step size that back ends get


def affine(low: Tensor, high: Tensor, levels: Tensor | int) -> tuple[Tensor, Tensor]:
    """Return scale and zero point of integers 0 to `levels` for `low` <= 0 to `high` >= 0; zero is exact."""
    width = high - low
    scale = (width + (width == 0)) / levels
    return scale, (-low / scale).round()


def rounded(x: Tensor, scale: Tensor, zero_point: Tensor | None, low: int, high: int) -> Tensor:
    """Round x; `scale` and `zero_point` broadcast with x, a zero point of None is symmetric."""
    q = torch.div(x.float(), scale).round_()
    if zero_point is None:
        q.clamp_(low, high)
    else:
        q.add_(zero_point).clamp_(low, high).sub_(zero_point)
    return q.mul_(scale).to(x.dtype)


class StraightThrough(torch.autograd.Function):
    """Round to (clamp(round(x / scale) + zero_point, low, high) - zero_point) * scale, in float32.

    The gradient passes for x in the range and is zero outside (Bengio et al. 2013, arXiv:1308.3432).
    torch.fake_quantize_per_tensor_affine with tensor parameters is not vectorized on a CPU and writes a mask.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor | None, low: int, high: int) -> Tensor:
        ctx.save_for_backward(x, scale, zero_point)
        ctx.bounds = low, high
        return rounded(x, scale, zero_point, low, high)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, scale, zero_point = ctx.saved_tensors
        low, high = ctx.bounds
        # In range: -|x / scale + zero_point - middle| > -(half the range), in one vectorized kernel.
        middle = (high + low) / 2
        place = torch.div(x.float(), scale)
        if zero_point is not None:
            place.add_(zero_point - middle)
        place.abs_().neg_()
        grad = torch.ops.aten.threshold_backward(grads[0].float(), place, -(high - low + 1) / 2)
        return grad.to(x.dtype), None, None, None, None


class LearnedStep(torch.autograd.Function):
    """Fake quantization with a trained scale (Esser et al. 2020, arXiv:1902.08153), in float32, cast to x's format.

    `growth`, the logarithm of the scale, and `scale` broadcast with x; only `scale` is read. The gradient of x passes
    inside the range and is zero outside. That of the scale is the sum of (rounded - exact) inside the range and of the
    bound outside, times `factor`, in the paper 1 / sqrt(n * largest integer). That of `growth` is it over the scale: to
    first order the paper's step under SGD, and the learning rate's share of the scale under Adam.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        growth: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        low: int,
        high: int,
        factor: float,
    ) -> Tensor:
        ctx.save_for_backward(x, scale, zero_point)
        ctx.settings = low, high, factor, growth.dtype
        return rounded(x, scale, zero_point, low, high)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None, None]:
        x, scale, zero_point = ctx.saved_tensors
        low, high, factor, kind = ctx.settings
        grad = grads[0].float()
        # Arithmetic instead of masks: on a CPU these kernels are vectorized, comparisons are not.
        exact = torch.div(x.float(), scale)
        if zero_point is not None:
            exact.add_(zero_point)
        nearest = exact.round().clamp_(low, high)
        middle = (high + low) / 2
        within = torch.ops.aten.threshold_backward(grad, (exact - middle).abs_().neg_(), -(high - low + 1) / 2)
        # inside: nearest - exact; outside: the bound
        slope = nearest if zero_point is None else nearest.sub_(zero_point)
        slope.mul_(grad).sub_((exact if zero_point is None else exact.sub_(zero_point)).mul_(within))
        dims = [i for i in range(slope.dim()) if scale.dim() != slope.dim() or scale.shape[i] == 1]
        total = slope.sum(dims, keepdim=True) if scale.dim() == slope.dim() else slope.sum()
        return within.to(x.dtype), (total.view_as(scale) * (factor / scale)).to(kind), None, None, None, None, None


class Untouched(torch.autograd.Function):
    """Identity with a zero gradient for an inactive scale: DDP waits for every parameter's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.zeros_like(ctx.saved_tensors[0])


class FakeQuantize(nn.Module):
    """Round a tensor to values of `bits`-bit integers.

    Weights are symmetric, [-(2^(bits-1) - 1), 2^(bits-1) - 1] with zero at zero, so that a pruned weight stays zero;
    activations are affine, [0, 2^bits - 1]. The range comes from:

    - `follows`: the tensor itself, at each call; for weights until their range is frozen, and for dynamic activations.
    - otherwise observation in training mode. `forward` only widens `batch_minimum` and `batch_maximum`; `ranges.update`
      sets the ranges of all quantizers once per optimizer step. So a recomputed forward changes nothing, accumulated
      batches count as one, and ranks can agree.
    - `lsq`: training. The parameter `growth` is the logarithm of the scale over its first value; `ranges.update`
      computes `scale` after each step. So an optimizer step changes it by a share of itself, and it can't become zero.

    `scale` (float32) and `zero_point` (int32) have shape [1] (`axis` None), [channels] (`axis` 0), or [channels,
    groups] with a `group_size`: that many weights of an output channel share a scale. `enabled` and `observing` are
    buffers, so that they resume with the net; `forward` reads Python copies of them, since reading a tensor waits for
    the device and breaks a compiled graph: change them with `switch`.
    """

    never_decayed: ClassVar[tuple[str, ...]] = ("growth",)  # parameters without weight decay
    scale: Tensor
    zero_point: Tensor
    minimum: Tensor
    maximum: Tensor
    batch_minimum: Tensor
    batch_maximum: Tensor
    updates: Tensor
    enabled: Tensor
    observing: Tensor
    growth: Tensor  # with lsq only
    first: Tensor

    def __init__(
        self,
        bits: int = 8,
        *,
        symmetric: bool,
        axis: int | None = None,
        channels: int = 1,
        group_size: int | None = None,
        groups: int = 1,
        follows: bool = False,
        lsq: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.bits, self.symmetric, self.axis, self.group_size = bits, symmetric, axis, group_size
        self.follows, self.lsq = follows, lsq
        self.observer: TrainingObserver = "moving_average"
        self.percentile = 99.99
        self.shared = False  # several layers read the same tensor through this quantizer
        self.high: int = 2 ** (bits - 1) - 1 if symmetric else 2**bits - 1
        self.low: int = -self.high if symmetric else 0
        shape = [1] if axis is None else [channels, groups] if group_size is not None else [channels]
        self.register_buffer("scale", torch.ones(shape, device=device))
        if lsq:
            self.growth = nn.Parameter(torch.zeros(shape, device=device))
            self.register_buffer("first", torch.ones(shape, device=device))
        # int32, so that no moving average of buffers makes it fractional
        self.register_buffer("zero_point", torch.zeros(shape, dtype=torch.int32, device=device))
        self.register_buffer("minimum", torch.zeros(shape, device=device))
        self.register_buffer("maximum", torch.zeros(shape, device=device))
        self.register_buffer("batch_minimum", torch.full([1], torch.inf, device=device), persistent=False)
        self.register_buffer("batch_maximum", torch.full([1], -torch.inf, device=device), persistent=False)
        self.register_buffer("updates", torch.zeros((), dtype=torch.int32, device=device))
        self.register_buffer("enabled", torch.zeros((), dtype=torch.uint8, device=device))
        self.register_buffer("observing", torch.ones((), dtype=torch.uint8, device=device))
        self.is_enabled, self.is_observing = False, True

    def switch(self, *, enabled: bool | None = None, observing: bool | None = None) -> None:
        """Turn rounding or observing on or off, in the buffers too."""
        if enabled is not None:
            self.enabled.fill_(int(enabled))
            self.is_enabled = enabled
        if observing is not None:
            self.observing.fill_(int(observing))
            self.is_observing = observing

    def sync(self) -> None:
        """Read the flags from the buffers after a direct write; loading a state dict does so itself."""
        if not self.enabled.is_meta:
            self.is_enabled, self.is_observing = bool(self.enabled), bool(self.observing)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.sync()

    def view(self, values: Tensor, x: Tensor) -> Tensor:
        """View `values` of the scale's shape so that they broadcast with x (or `self.grouped(x)`)."""
        if self.axis is None:
            return values
        return values.view(-1, *[1] * (x.dim() - 1)) if self.group_size is None else values.unsqueeze(-1)

    def grouped(self, x: Tensor) -> Tensor:
        """Return x as [channels, groups, group_size] if groups share a scale, else x."""
        return x if self.group_size is None else x.reshape(x.shape[0], -1, self.group_size)

    def extremes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and largest value of x and zero for each scale, float32, of the scale's shape."""
        x = self.grouped(x.detach())
        low: Tensor
        high: Tensor
        if self.axis is None:
            low, high = torch.aminmax(x)
            low, high = low.view(1), high.view(1)
        else:
            low, high = torch.aminmax(x if self.group_size is not None else x.flatten(1), dim=-1)
        return low.float().clamp_max(0), high.float().clamp_min(0)

    def qparams(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and zero point of `forward(x)`, of the scale's shape."""
        if self.follows and self.is_observing and not self.lsq:
            return self.from_range(*self.extremes(x))
        return self.scale, self.zero_point

    def from_range(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and zero point for `low` <= 0 and `high` >= 0; 1 / `self.high` for an empty range."""
        if self.symmetric:
            largest = torch.maximum(high, -low)
            return (largest + (largest == 0)) / self.high, torch.zeros_like(largest)
        return affine(low, high, self.high)

    def set_range(self, low: Tensor, high: Tensor) -> None:
        """Fix the range, as calibration does: tensors of the scale's shape."""
        with torch.no_grad():
            low, high = low.float().clamp_max(0).to(self.scale.device), high.float().clamp_min(0).to(self.scale.device)
            self.minimum.copy_(low)
            self.maximum.copy_(high)
            scale, zero_point = self.from_range(low, high)
            self._begin(scale)
            self.zero_point.copy_(zero_point)

    def set_first_step(self, weight: Tensor) -> None:
        """Set LSQ's first step size from a weight: the paper's 2 * mean |w| / sqrt(largest integer), 1 for zeros."""
        with torch.no_grad():
            x = self.grouped(weight)
            dims = (
                list(range(x.dim())) if self.axis is None else list(range(1 if self.group_size is None else 2, x.dim()))
            )
            mean = x.detach().float().abs().mean(dims, keepdim=True)
            self._begin(torch.where(mean > 0, 2 * mean / self.high**0.5, 1.0).view_as(self.scale))

    def restart(self) -> None:
        """Restart learned scales from `scale`: after an EMA has averaged both, `growth` differs from it."""
        with torch.no_grad():
            self._begin(self.scale)

    def _begin(self, scale: Tensor) -> None:
        self.scale.copy_(scale)
        if self.lsq:
            self.first.copy_(scale)
            self.growth.zero_()

    def integers(self, x: Tensor) -> Tensor:
        """Return the integers that x is rounded to, float32, of x's shape."""
        scale, zero_point = self.qparams(x)
        y = self.grouped(x.detach()).float()
        q = torch.div(y, self.view(scale.detach(), y)).round_() + self.view(zero_point, y)
        return q.clamp_(self.low, self.high).view(x.shape)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.is_observing and not self.follows:
            self.watch(x)
        if self.is_enabled:
            return self._kept(x) if self.shared and not torch.compiler.is_compiling() else self.quantize(x)
        if self.lsq and torch.is_grad_enabled():
            passed: Tensor = Untouched.apply(x, self.growth)
            return passed
        return x

    def _kept(self, x: Tensor) -> Tensor:
        """Round x once for all layers that read it; the result is cached on x.

        Activation checkpointing must not use the first pass's result, nor the other way round, or the two would save
        different tensors.
        """
        place = (
            torch._C._current_graph_task_id(),
            _saving(),
            torch.is_grad_enabled(),
            None if x.is_inference() else x._version,
        )
        kept = x.__dict__.get("_lathe_rounded")
        if kept is None or kept[0] is not self or kept[1] != place:
            kept = (self, place, self.quantize(x))
            x._lathe_rounded = kept  # type: ignore[attr-defined]
        out: Tensor = kept[2]
        return out

    def batch_range(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and largest value of x, each of shape [1].

        With observer=percentile, those of at most 16384 evenly spaced values within that share on each side.
        """
        if self.observer != "percentile":
            low, high = torch.aminmax(x)
            return low.view(1), high.view(1)
        flat = x.detach().flatten()
        flat = flat[:: max(1, flat.numel() // SAMPLE)].float().sort().values
        drop = round((flat.numel() - 1) * (1 - self.percentile / 100))
        return flat[drop].view(1), flat[flat.numel() - 1 - drop].view(1)

    def watch(self, x: Tensor) -> None:
        """Add x to the extremes of the current optimizer step."""
        with torch.no_grad():
            low, high = self.batch_range(x)
            self.batch_minimum.copy_(torch.minimum(self.batch_minimum, low.float()))
            self.batch_maximum.copy_(torch.maximum(self.batch_maximum, high.float()))

    def quantize(self, x: Tensor) -> Tensor:
        """Round x, whatever the flags."""
        scale, zero_point = self.qparams(x)
        y = self.grouped(x)
        scale = self.view(scale, y)
        shift = None if self.symmetric else self.view(zero_point.float(), y)
        out: Tensor
        if not torch.is_grad_enabled() or not (x.requires_grad or self.lsq):
            out = rounded(y, scale, shift, self.low, self.high)
        elif self.lsq:
            values = x.numel() // x.shape[0] if not self.symmetric or self.axis == 0 else x.numel()
            growth = self.view(self.growth, y)
            out = LearnedStep.apply(y, growth, scale, shift, self.low, self.high, (values * self.high) ** -0.5)
        else:
            out = StraightThrough.apply(y, scale, shift, self.low, self.high)
        return out if self.group_size is None else out.reshape(x.shape)


def _saving() -> int:
    """Return an id of the current activation-checkpointing region; not called under a compiler."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = top(True) if top is not None else None
    return 0 if hooks is None else id(hooks[0])
