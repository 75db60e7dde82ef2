"""Empirical bias correction.

Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction", arXiv:1906.04721, section
4.2 and appendix D. Rounding a layer's weights shifts the mean of its outputs, channel by channel. The shift, measured
on calibration data, is subtracted from the layer's bias, or added to the running mean of the BatchNorm that is its only
reader.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lathe.compression.modes import evaluated
from lathe.compression.quantization.equalize import LAYERS, followers

SAMPLES = 1024  # most inputs at once: all of their activations are in memory
PIXELS, TOKENS = 2**23, 2**12  # most of all inputs together; a token takes the logits of a whole vocabulary
ROWS = 64  # inputs summed in float64 at a time


def channel_means(layer: nn.Module, outputs: Tensor) -> Tensor:
    """Return the mean of each output channel: dimension 1 of a convolution, the last of a linear layer."""
    channel = outputs.dim() - 1 if isinstance(layer, nn.Linear) else 1
    others = [d for d in range(outputs.dim()) if d != channel]
    total = torch.stack([part.double().sum(dim=others) for part in outputs.detach().split(ROWS)]).sum(0)
    return (total * outputs.shape[channel] / outputs.numel()).float()


@torch.no_grad()
def expected_outputs(net: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """Return the mean of each output channel of every convolution and linear layer that runs once."""
    found: dict[str, list[Tensor]] = {}

    def note(name: str, layer: nn.Module, outputs: Tensor) -> None:
        found.setdefault(name, []).append(channel_means(layer, outputs))

    _run(net, inputs, note)
    return {name: means[0] for name, means in found.items() if len(means) == 1}


@torch.no_grad()
def correct_bias(
    net: nn.Module, inputs: Tensor, expected: Mapping[str, Tensor], norms: Mapping[str, str]
) -> dict[str, list[str]]:
    """Restore the mean outputs `expected` of layers of the quantized `net`, in place.

    `expected` is what `expected_outputs` returned for the same `inputs` before rounding; `norms` are the layers'
    BatchNorms (`equalize.followers`). A layer is corrected as it runs, so that each correction includes the previous
    ones. Returns the layers by "bias", "batchnorm" and "uncorrected" (neither of the two).
    """
    modules: dict[str, Any] = dict(net.named_modules())
    done: dict[str, list[str]] = {"bias": [], "batchnorm": [], "uncorrected": []}

    def correct(name: str, layer: Any, outputs: Tensor) -> Tensor | None:
        if name not in expected:
            return None
        shift = channel_means(layer, outputs) - expected[name]
        if layer.bias is not None:
            layer.bias.sub_(shift)
            done["bias"].append(name)
        elif name in norms:
            modules[norms[name]].running_mean.add_(shift)
            done["batchnorm"].append(name)
            return None  # the BatchNorm runs next, and subtracts it
        else:
            done["uncorrected"].append(name)
            return None
        return outputs - shift.view(-1, *[1] * (0 if isinstance(layer, nn.Linear) else outputs.dim() - 2))

    _run(net, inputs, correct)
    return done


def first_inputs(batches: Sequence[Tensor]) -> Tensor:
    """Return the first inputs as a batch: images `[batch, channels, height, width]`, features or tokens."""
    first = batches[0]
    tokens = not first.is_floating_point()
    size = first[0].numel() if tokens or first.dim() < 4 else first[0, 0].numel()
    rows = min(SAMPLES, max(1, (TOKENS if tokens else PIXELS) // max(size, 1)))
    alike = [batch for batch in batches if batch.shape[1:] == first.shape[1:]]  # batches of documents differ in length
    return torch.cat(alike)[:rows]


class Means:
    """Mean outputs of a float net's layers, to be restored after quantization.

    ```python
    means = Means(net, batches)
    ...                                # round the weights of `net`
    means.restore(net, layers)
    ```

    Measured on the first 1024 inputs, or as many as have 8 million pixels or 4096 tokens in total.
    """

    def __init__(self, net: nn.Module, batches: Sequence[Tensor]) -> None:
        self.inputs = first_inputs(batches)
        self.expected = expected_outputs(net, self.inputs)
        self.norms = followers(net, self.inputs[:2])

    def restore(self, net: nn.Module, layers: Container[str]) -> dict[str, list[str]]:
        """Apply `correct_bias` to `layers`."""
        return correct_bias(net, self.inputs, {n: mean for n, mean in self.expected.items() if n in layers}, self.norms)


def _run(net: nn.Module, inputs: Tensor, act: Callable[[str, nn.Module, Tensor], Tensor | None]) -> None:
    """Run `net(inputs)` in eval mode; `act(name, layer, outputs)` may replace each layer's outputs."""

    def hook(name: str) -> Callable[[nn.Module, Any, Tensor], Tensor | None]:
        return lambda layer, _, outputs: act(name, layer, outputs)

    handles = [
        layer.register_forward_hook(hook(name)) for name, layer in net.named_modules() if isinstance(layer, LAYERS)
    ]
    with evaluated(net, handles):
        net(inputs)
