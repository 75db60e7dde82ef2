"""Operations of a net's forward pass (FLOPs, and MACs by layer), and the peak rate of a device."""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

# Dense peak rates in TFLOP/s (float16, bfloat16, tf32, float32), accumulating in float32, from NVIDIA's data sheets and
# architecture white papers; rates printed "with sparsity" are halved. The pattern has to match the whole device name:
# laptop chips and MIG slices are slower than the card they are named after, and so are unknown.
_PEAKS: tuple[tuple[str, tuple[float | None, float | None, float | None, float]], ...] = (
    (r"NVIDIA B200", (2250, 2250, 1125, 75)),  # Blackwell architecture technical brief; DGX B200 data sheet, per GPU
    (r"NVIDIA (H200|H100 80GB HBM3|GH200 .*)", (989.4, 989.4, 494.7, 66.9)),  # H100 white paper, SXM5; H200 data sheet
    (r"NVIDIA (H100|H200) NVL", (835.5, 835.5, 417.5, 60)),  # H100 and H200 data sheets, NVL
    (r"NVIDIA H100 PCIe", (756, 756, 378, 51.2)),  # H100 white paper, PCIe
    (r"NVIDIA A100.*GB( PCIe)?", (312, 312, 156, 19.5)),  # A100 white paper
    (r"NVIDIA A40", (149.7, 149.7, 74.8, 37.4)),  # A40 data sheet
    (r"NVIDIA A10", (125, 125, 62.5, 31.2)),  # A10 data sheet
    (r"NVIDIA RTX A6000", (154.8, 154.8, 77.4, 38.7)),  # GA102 white paper
    (r"NVIDIA L40S", (362, 362, 183, 91.6)),  # L40S data sheet
    (r"NVIDIA L40", (181, 181, 90.5, 90.5)),  # L40 data sheet
    (r"NVIDIA L4", (121, 121, 60, 30.3)),  # L4 data sheet
    (r"NVIDIA GeForce RTX 5090", (209.5, 209.5, 104.8, 104.8)),  # RTX Blackwell white paper
    (r"NVIDIA GeForce RTX 4090", (165.2, 165.2, 82.6, 82.6)),  # Ada white paper
    (r"NVIDIA GeForce RTX 3090", (71, 71, 35.6, 35.6)),  # GA102 white paper
    (r"(NVIDIA |Tesla )?V100-(SXM2|SXM3)-.*", (125, None, None, 15.7)),  # V100 data sheet; no bfloat16, no TF32
    (r"(NVIDIA |Tesla )?V100-PCIE-.*", (112, None, None, 14)),  # V100 data sheet
    (r"(NVIDIA |Tesla )?T4", (65, None, None, 8.1)),  # T4 data sheet
)
_COLUMNS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 3}


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Count attention by its shapes, for the CPU kernel that torch's counter leaves out."""
    return int(sdpa_flop_count(query, key, value))


ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}


def net_input(batch: Any) -> Tensor:
    """Return the tensor that a net takes: the first of a tuple, list or dict, or the batch; else raise TypeError."""
    if isinstance(batch, Tensor):
        return batch
    items = list(batch.values()) if isinstance(batch, dict) else batch
    if not isinstance(items, list | tuple) or not items:
        raise TypeError(f"no tensor in a batch of type {type(batch).__name__}")
    return net_input(items[0])


@dataclass(frozen=True)
class Macs:
    """MACs of all products, of those with non-zero weights, and of each layer with a matrix or kernel.

    Products outside `layers` count in both. Common hardware does not skip unstructured zeros.
    """

    dense: int
    effective: int
    layers: dict[str, int]


def count_flops(net: nn.Module, example: Tensor | tuple[Tensor, ...]) -> int:
    """Return the FLOPs of one forward pass on `example`, one argument or several; a multiply-add counts as two.

    Counts matrix products, convolutions and attention, as `torch.utils.flop_counter` does, without biases, norms and
    activations. The net runs eagerly in eval mode; its modes, gradients and the random state are restored. A training
    step costs about three times as much, since backward computes two products for each product of forward.
    """
    return int(_count(net, example).get_total_flops())


def count_macs(net: nn.Module, example: Tensor | tuple[Tensor, ...]) -> Macs:
    """Return the MACs of one forward pass on the batch `example`, counted as in `count_flops`."""
    counter = _count(net, example)
    counts = {name: sum(each.values()) for name, each in counter.get_flop_counts().items()}
    total, layers = int(counter.get_total_flops()) // 2, dict[str, int]()
    effective = total
    for name, module in net.named_modules():
        weight = module._parameters.get("weight")
        flops = counts.get(f"{type(net).__name__}.{name}".removesuffix("."), 0)
        if weight is not None and weight.dim() >= 2 and flops:  # a matrix or kernel, not a norm's weight
            layers[name] = flops // 2
            effective += round(flops // 2 * int(weight.detach().count_nonzero()) / weight.numel()) - flops // 2
    return Macs(total, effective, layers)


def _count(net: nn.Module, example: Tensor | tuple[Tensor, ...]) -> FlopCounterMode:
    inputs = (example,) if isinstance(example, Tensor) else example
    modes = [(module, module.training) for module in net.modules()]
    counter = FlopCounterMode(display=False, custom_mapping=ATTENTION)
    seed = torch.random.fork_rng(devices=[inputs[0].device] if inputs[0].is_cuda else [])
    net.eval()
    try:
        # The counter cannot see into the fused graph of a compiled net.
        with seed, torch.no_grad(), torch.compiler.set_stance("force_eager"), counter:
            net(*inputs)
    finally:
        for module, training in modes:
            module.training = training
    return counter


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the data sheet's FLOP/s for products of `dtype` (float32: TF32 if allowed); None if not in the table."""
    if device.type != "cuda":
        return None
    return peak_by_name(torch.cuda.get_device_name(device), dtype)


def peak_by_name(name: str, dtype: torch.dtype) -> float | None:
    """Return `peak_flops` for a name that `torch.cuda.get_device_name` returns."""
    for pattern, row in _PEAKS:
        if re.fullmatch(pattern, name) and dtype in _COLUMNS:
            # The older `allow_tf32` flags raise if the newer ones were set.
            convolutions = torch.backends.cudnn.conv  # type: ignore[attr-defined]  # set at run time
            allowed = "tf32" in (torch.backends.cuda.matmul.fp32_precision, convolutions.fp32_precision)
            tf32 = row[2] if dtype is torch.float32 and allowed else None
            rate = tf32 or row[_COLUMNS[dtype]]
            return rate * 1e12 if rate else None
    return None
