"""Fake quantization of tensors, with straight-through gradients or learned step sizes (LSQ), and its ranges."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from lathe.compression.modes import evaluated, uncompiled
from lathe.errors import UserError, require
from lathe.measure.calls import run
from lathe.measure.shards import whole

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
        position = torch.div(x.float(), scale)
        if zero_point is not None:
            position.add_(zero_point - middle)
        position.abs_().neg_()
        grad = torch.ops.aten.threshold_backward(grads[0].float(), position, -(high - low + 1) / 2)
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
    - otherwise observation in training mode. `forward` only widens `batch_minimum` and `batch_maximum`;
      `update_quantizers` sets the ranges of all quantizers once per optimizer step. So a recomputed forward changes
      nothing, accumulated batches count as one, and ranks can agree.
    - `lsq`: training. The parameter `growth` is the logarithm of the scale over its first value; `update_quantizers`
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
            return self._quantize_once(x) if self.shared and not torch.compiler.is_compiling() else self.quantize(x)
        if self.lsq and torch.is_grad_enabled():
            passed: Tensor = Untouched.apply(x, self.growth)
            return passed
        return x

    def _quantize_once(self, x: Tensor) -> Tensor:
        """Round x once for all layers that read it; the result is cached on x.

        Activation checkpointing must not use the first pass's result, nor the other way round, or the two would save
        different tensors.
        """
        top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
        hooks = top(True) if top is not None else None  # of the current activation-checkpointing region
        region, version = 0 if hooks is None else id(hooks[0]), None if x.is_inference() else x._version
        key = torch._C._current_graph_task_id(), region, torch.is_grad_enabled(), version
        cached = x.__dict__.get("_lathe_rounded")
        if cached is None or cached[0] is not self or cached[1] != key:
            cached = (self, key, self.quantize(x))
            x._lathe_rounded = cached  # type: ignore[attr-defined]
        out: Tensor = cached[2]
        return out

    def watch(self, x: Tensor) -> None:
        """Add x to the extremes of the current optimizer step.

        With observer=percentile, those of at most 16384 evenly spaced values within that share on each side.
        """
        with torch.no_grad():
            if self.observer != "percentile":
                low, high = torch.aminmax(x)
            else:
                flat = x.detach().flatten()
                flat = flat[:: max(1, flat.numel() // SAMPLE)].float().sort().values
                drop = round((flat.numel() - 1) * (1 - self.percentile / 100))
                low, high = flat[drop], flat[flat.numel() - 1 - drop]
            self.batch_minimum.copy_(torch.minimum(self.batch_minimum, low.view(1).float()))
            self.batch_maximum.copy_(torch.maximum(self.batch_maximum, high.view(1).float()))

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


def quantizers(net: nn.Module) -> list[FakeQuantize]:
    """Return every quantizer of `net` once, in order."""
    return [module for module in net.modules() if isinstance(module, FakeQuantize)]


def some_quantizers(net: nn.Module) -> list[FakeQuantize]:
    """Return `quantizers(net)`; raise UserError if there are none."""
    present = quantizers(net)
    if not present:
        raise UserError(f"{type(net).__name__} has no quantized layer: quantize it first.")
    return present


Observer = Literal["minmax", "percentile", "entropy"]
BINS = 2048
MEMORY = 0.01  # of the newest step in a moving average, as in torch's observers


def calibrate(net: nn.Module, batches: Iterable[Any], method: Observer = "minmax", percentile: float = 99.99) -> None:
    """Set the ranges of activations from `batches`, fix them and turn rounding on.

    Batches are inputs, tensors or Calls, or tuples that begin with them. `minmax` takes the extremes, `percentile` that
    share of the values, `entropy` the clipping of least KL divergence (Migacz 2017); the last two read the batches
    twice, and keep those of an iterator in memory.
    """
    require(method in get_args(Observer), f"method={method}: choose one of {', '.join(get_args(Observer))}.")
    all_quantizers = some_quantizers(net)
    watched = [q for q in all_quantizers if not q.symmetric and not q.follows]
    data = batches if method == "minmax" or not hasattr(batches, "__next__") else list(batches)
    for q in all_quantizers:
        q.switch(enabled=False)
    extremes = {id(q): (torch.zeros(1), torch.zeros(1)) for q in watched}

    def widen(q: FakeQuantize, x: Tensor) -> None:
        low, high = q.extremes(x)
        was = extremes[id(q)]
        extremes[id(q)] = torch.minimum(was[0], low.cpu()), torch.maximum(was[1], high.cpu())

    require(_passes(net, data, watched, widen) > 0, "Calibration was given no batch: give at least one.")
    if method != "minmax":
        histograms = {id(q): Histogram(*(float(end) for end in extremes[id(q)])) for q in watched}
        _passes(net, data, watched, lambda q, x: histograms[id(q)].add(x))
        for q in watched:
            low, high = histograms[id(q)].range(method, percentile, q.bits)
            extremes[id(q)] = torch.tensor([low]), torch.tensor([high])
    for q in watched:
        q.set_range(*extremes[id(q)])
        q.switch(observing=False)
    for q in all_quantizers:
        q.switch(enabled=True)


def _passes(
    net: nn.Module, batches: Iterable[Any], watched: list[FakeQuantize], see: Callable[[FakeQuantize, Tensor], None]
) -> int:
    """Run the net over the batches and pass each quantizer's input to `see`; return the number of batches."""
    handles = [q.register_forward_pre_hook(lambda q, args: see(q, args[0].detach())) for q in watched]
    count = 0
    with evaluated(net, handles), torch.no_grad(), uncompiled(net):
        for batch in batches:
            run(net, batch[0] if isinstance(batch, tuple | list) else batch)
            count += 1
    return count


def update_quantizers(quantizers: Sequence[FakeQuantize], reduce_max: Callable[[Tensor], None] | None = None) -> None:
    """Set ranges from the forwards since the last call, and LSQ's scales; call once per optimizer step.

    A moving average starts as a plain mean: the t-th update weighs max(1/t, 0.01). Quantizers without values and steps
    that are not finite (fp16) keep their range. `reduce_max` replaces a tensor by its maximum over all ranks, in place:
    ranges then equal those of one process with the whole batch.
    """
    with torch.no_grad():
        for q in quantizers:
            if q.lsq and q.is_enabled:
                q.scale.copy_(q.first * whole(q.growth).float().exp())  # under fsdp a DTensor
        watching = [q for q in quantizers if q.is_observing and not q.follows]
        if not watching:
            return
        seen = torch.stack(
            [-torch.cat([q.batch_minimum for q in watching]), torch.cat([q.batch_maximum for q in watching])]
        ).float()
        if reduce_max is not None:
            reduce_max(seen)
        counts = torch.stack([q.updates for q in watching])
        old = torch.stack([-torch.cat([q.minimum for q in watching]), torch.cat([q.maximum for q in watching])]).float()
        new = seen.clamp_min(0)  # the range includes zero
        valid = seen.isfinite().all(0)
        first = counts == 0
        weight = (1 / (counts + 1)).clamp_min(MEMORY)
        widest = torch.tensor([q.observer == "minmax" for q in watching], device=seen.device)
        mixed = torch.where(widest & ~first, torch.maximum(old, new), torch.lerp(old, new, weight))
        low, high = torch.where(valid, mixed, old)
        low = -low
        levels = torch.tensor([float(q.high) for q in watching], device=seen.device)
        scale, zero_point = affine(low, high, levels)
        torch._foreach_copy_([q.minimum for q in watching], list(low.split(1)))
        torch._foreach_copy_([q.maximum for q in watching], list(high.split(1)))
        plain = [i for i, q in enumerate(watching) if not q.lsq]
        if plain:
            torch._foreach_copy_([watching[i].scale for i in plain], [scale[i : i + 1] for i in plain])
        torch._foreach_copy_([q.zero_point for q in watching], list(zero_point.split(1)))
        torch._foreach_copy_([q.updates for q in watching], list((counts + valid).to(counts.dtype).unbind()))
        for q in watching:  # the extremes since the last update
            q.batch_minimum.fill_(torch.inf)
            q.batch_maximum.fill_(-torch.inf)


class Histogram:
    """Counts of values in 2048 equal bins between `low` and `high`, on the CPU."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = min(low, 0.0), max(high, 0.0)
        self.counts = torch.zeros(BINS, dtype=torch.float64)

    def add(self, x: Tensor) -> None:
        if self.high > self.low:
            self.counts += torch.histc(x.detach().float(), BINS, self.low, self.high).cpu().double()

    def range(self, method: str, percentile: float, bits: int) -> tuple[float, float]:
        """Return the range by `entropy` or `percentile` (share inside; the rest half on each nonzero side)."""
        if not self.counts.sum():
            return self.low, self.high
        if method != "percentile":
            return self._entropy(2**bits)
        share = self.counts.cumsum(0) / self.counts.sum()
        one_sided = self.low == 0.0 or self.high == 0.0
        outside = (1 - percentile / 100) / (1 if one_sided else 2)
        width = (self.high - self.low) / BINS
        below = int(torch.searchsorted(share, outside)) if self.low < 0 else 0
        above = int(torch.searchsorted(share, 1 - outside)) + 1 if self.high > 0 else BINS
        return min(self.low + below * width, 0.0), max(self.low + min(above, BINS) * width, 0.0)

    def _entropy(self, levels: int) -> tuple[float, float]:
        """Return the clipping of least KL divergence (Migacz 2017, "8-bit Inference with TensorRT").

        Both ends move towards zero together, as in ONNX Runtime.
        """
        width = (self.high - self.low) / BINS
        zero = round(-self.low / width)
        reach = max(zero, BINS - zero)  # bins on the longer side
        best, chosen = float("inf"), reach
        step = max(1, reach // 128)
        for bins in range(max(levels // 2 if zero else levels, step), reach + 1, step):
            start, stop = max(0, zero - bins), min(BINS, zero + bins)
            if stop - start < levels:
                continue
            distance = self._divergence(start, stop, levels)
            if distance < best:
                best, chosen = distance, bins
        start, stop = max(0, zero - chosen), min(BINS, zero + chosen)
        return (self.low if start == 0 else self.low + start * width), (
            self.high if stop == BINS else self.low + stop * width
        )

    def _divergence(self, start: int, stop: int, levels: int) -> float:
        inner = self.counts[start:stop]
        p = inner.clone()
        p[0] += self.counts[:start].sum()
        p[-1] += self.counts[stop:].sum()
        # q: the same counts in `levels` bins, each spread evenly over its nonempty original bins
        bins = torch.arange(stop - start) * levels // (stop - start)
        filled = (p > 0).double()
        total = torch.zeros(levels, dtype=torch.float64).index_add_(0, bins, inner)
        number = torch.zeros(levels, dtype=torch.float64).index_add_(0, bins, filled)
        q = (total / number.clamp_min(1))[bins] * filled
        if not q.sum():
            return float("inf")
        p, q = _smoothed(p / p.sum()), _smoothed(q / q.sum())
        return float((p * (p / q).log()).where(p > 0, torch.zeros(())).sum())


def _smoothed(p: Tensor, epsilon: float = 1e-4) -> Tensor:
    """Move some mass to empty bins, as ONNX Runtime does, so that the divergence is finite."""
    empty = p == 0
    n = int(empty.sum())
    if n == 0 or n == p.numel():
        return p
    return torch.where(empty, epsilon, p - epsilon * n / (p.numel() - n)).clamp_min(1e-12)
