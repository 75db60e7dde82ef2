"""The contents of a receipt except latency: structure, sizes, MACs, metrics and agreement."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lathe.compression import quantization
from lathe.compression.structure import structure_of
from lathe.config.compression_plan import methods
from lathe.data.order import IGNORE
from lathe.errors import UserError
from lathe.measure import Agreement, AgreementMeter, PeakMemory, count_macs, count_parameters
from lathe.runs.inference import Forward, score
from lathe.runs.metric_names import ENERGY
from lathe.runs.rundir import RunDir
from lathe.tasks import Task

NOTHING = 1e-3  # a smaller share of zeros is not pruning: any net may have a few
KEPT = 2**24  # logits of the dense net to cache for all back ends: 64 MiB


def kinds_of(cfg: Mapping[str, Any]) -> dict[str, str]:
    """Return the kinds of a run's compression methods, by name."""
    return {name: node["kind"] for name, node in methods(cfg.get("compression") or {}).items()}


def energy(run: RunDir | None) -> dict[str, float]:
    """Return the joules of the run's training (energy_gpu_j, energy_cpu_j); empty if it is not complete.

    callbacks=[default,device_stats] records them.
    """
    result = run.result if run is not None and (run.path / "result.json").is_file() else {}
    return {name: result[name] for name in ENERGY if isinstance(result.get(name), float)}


def is_quantized(net: nn.Module) -> bool:
    """Return whether `net` has quantized layers."""
    return "quantization" in structure_of(net)


def weight_sparsity(net: nn.Module) -> float:
    """Return the share of zeros among the maskable weights: those of at least two dimensions."""
    weights = [p for _, p in _weights(net)]
    total = sum(w.numel() for w in weights)
    return sum(w.numel() - int(w.detach().count_nonzero()) for w in weights) / total if total else 0.0


def _weights(net: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, module in net.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.dim() >= 2:
            yield name, weight


def changed_nothing(kinds: Mapping[str, str], net: nn.Module) -> list[str]:
    """Return a warning for each method that has left `net` unchanged; distillation is exempt."""
    structure, sentences = structure_of(net), []
    for name, kind in kinds.items():
        if kind == "structure" and "channels" not in structure:
            sentences.append(
                f"compression={name} changed nothing: the net has all the channels that its configuration gives it."
            )
        elif kind == "masks" and weight_sparsity(net) < NOTHING:
            sentences.append(
                f"compression={name} changed nothing: {_none_of(weight_sparsity(net))} of the weights is zero."
            )
        elif kind in ("quantization", "after") and "quantization" not in structure:
            sentences.append(f"compression={name} changed nothing: no layer is quantized.")
    return sentences


def _none_of(share: float) -> str:
    return "none" if share == 0 else f"a share of {share:.2g}"


def sizes(net: nn.Module, sample: Tensor) -> dict[str, int]:
    """Return the number of parameters and MACs; `sample` is a batch of one."""
    count, macs = count_parameters(net), count_macs(net, sample)
    return {"parameters": count.total, "non_zero": count.non_zero, "macs": macs.dense, "effective_macs": macs.effective}


def layers(net: nn.Module, sample: Tensor) -> list[dict[str, Any]]:
    """Return shape, sparsity and MACs of each layer's weight.

    `integer_sparsity` is the share of zeros among the exported integers, including those of rounding.
    """
    macs = count_macs(net, sample).layers
    quantized = quantization.quantized_layers(net) if is_quantized(net) else {}
    found = []
    for name, weight in _weights(net):
        integers = quantization.integer_weight(quantized[name])[0] if name in quantized else None
        found.append(
            {
                "name": name,
                "shape": list(weight.shape),
                "weights": weight.numel(),
                "sparsity": _zeros(weight),
                "integer_sparsity": None if integers is None else _zeros(integers),
                "macs": macs[name].dense if name in macs else 0,
            }
        )
    return found


def _zeros(tensor: Tensor) -> float:
    return 1 - int(tensor.detach().count_nonzero()) / max(1, tensor.numel())


def peak_memory(net: nn.Module, x: Tensor) -> int:
    """Return the peak bytes of tensors in an eager forward pass on `x`, including the net's.

    On a GPU, tensors that existed before are not counted.
    """
    device = next(net.parameters()).device
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    own = sum(t.numel() * t.element_size() for t in [*net.parameters(), *net.buffers()]) if device.type == "cuda" else 0
    with PeakMemory(device, known=[*net.parameters(), *net.buffers(), x]) as memory:
        memory.reset()
        net(x)
        return memory.peak - before + own


class _Watched:
    """Iterate over batches, and remember the current one."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches, self.number = batches, -1
        self.batch: Any = None

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.batches):
            self.number, self.batch = number, batch
            yield batch


class Reference:
    """The dense net's logits by batch, cached for all back ends if they are few."""

    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        self.forward = forward
        self._kept: dict[int, Tensor] = {}
        self._numbers = 0

    def __call__(self, number: int, x: Tensor) -> Tensor:
        """Return the logits for `x`, which is batch `number`."""
        found = self._kept.get(number)
        if found is None:
            found = self.forward(x)
            self._numbers += found.numel()
            if self._numbers <= KEPT:
                self._kept[number] = found
        return found


def scored(
    task: Task, forward: Forward, batches: Iterable[Any], reference: Reference | None = None
) -> tuple[dict[str, float], Agreement | None]:
    """Return the metrics of `forward` over `batches`, and its agreement with `reference`.

    Targets of -100 are ignored.
    """
    watched, meter = _Watched(batches), AgreementMeter(task.predicts)

    def watching(x: Tensor) -> Tensor:
        outputs = torch.as_tensor(forward(x))
        if reference is not None:
            target = watched.batch[1]
            every = task.predicts == "values" or (task.predicts == "classes" and target.is_floating_point())
            counts = None if every else target != IGNORE
            try:
                meter.add(outputs, reference(watched.number, x), counts)
            except ValueError as error:
                raise UserError(f"baseline can't be compared: {error}; give a run on the same data.") from error
        return outputs

    metrics = score(task, watching, watched)
    return metrics, meter.result if reference is not None else None


def moved(net: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of `net` on `device`."""
    return copy.deepcopy(net).to(device)
