"""Weight-only quantization: integers in the file, float arithmetic.

A scale per output channel or, for few bits, per group of weights along the input, as in Frantar et al. 2023, "GPTQ",
arXiv:2210.17323, section 4. Ranges include the largest weight: at 3 and 4 bits, ranges of least squared error of the
weights brought nets on digits no nearer to the float ones, while bias correction halves the squared error of their
outputs.
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
    """Quantize weights of convolutions, linear layers and embeddings, in place.

    The first of the inputs `batches` `[batch, ...]` shows which layers run; `bias_correction` measures means on the
    first 1024. A layer whose weights per output (of a convolution: channels x kernel) do not divide by the plan's
    `group_size` has one scale per output channel. `key` names `overrides` in messages.

    Raises:
        UserError: the net is quantized already, there are no batches or layers, or a pattern matches nothing.
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
