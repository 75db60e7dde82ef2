"""Quantization of weights alone: integers in the file, float in the arithmetic.

A scale for each output channel or, with few bits, for each group of weights along the input, as Frantar et al. 2023,
"GPTQ", arXiv:2210.17323, have it in section 4. Ranges reach to the largest weight: with ranges of least squared error
of the weights, nets on digits were no nearer to the float ones at 3 and 4 bits, while bias correction halves the
squared error of their outputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from lathe.compression.quantization.bias_correction import Means
from lathe.compression.quantization.net import LayerPlan, quantize
from lathe.compression.quantization.ptq import Quantized, refuse_quantized, start
from lathe.errors import UserError


def quantize_weights(
    net: nn.Module,
    batches: Sequence[Tensor],
    plan: LayerPlan | None = None,
    overrides: Mapping[str, LayerPlan | None] | None = None,
    *,
    bias_correction: bool = False,
    key: str = "overrides",
) -> Quantized:
    """Integer weights of convolutions, linear layers and embeddings, in place.

    Of the net's inputs `batches` `[batch, ...]`, the first shows which layers run; with `bias_correction`, the first
    1024 inputs say what means are to be restored. A layer whose weights for one output (of a convolution: channels x
    kernel) do not divide by the plan's `group_size` has one scale for each output channel. `key` names `overrides` in
    messages.

    Raises:
        UserError: the net is quantized already, there are no batches, it has no such layer, or a pattern matches
            nothing.
    """
    refuse_quantized(net)
    if not batches:
        raise UserError("Quantization was given no batch, which shows the layers that run: give at least one.")
    net.eval()
    means = Means(net, batches) if bias_correction else None
    plan = replace(plan or LayerPlan(), activation_bits=None, activation="none")
    done = start(net, quantize(net, batches[0][:2], plan, dict(overrides or {}), key=key))
    if means is not None:
        done.corrected = means.restore(net, done.layers)
    return done
