"""Selection of the parameters that may be masked."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from lathe.config.types import LayerTypes, Name, SomeNames
from lathe.config.validation import validated
from lathe.errors import UserError

HEAD_RULE = (
    "the head (the attribute `head` of the net, else its last linear layer) stays dense unless head=true, and "
    "embeddings, norms and biases unless types name them."
)

_CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)  # not transposed ones, whose first dimension is the input
_NORM = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)
_TYPES: dict[str, tuple[type[nn.Module], ...]] = {
    "linear": (nn.Linear,),
    "conv": _CONV,
    "embedding": (nn.Embedding,),
    "norm": _NORM,
}


@validated
def maskable(
    net: nn.Module,
    layers: SomeNames | None = None,
    exclude: Sequence[Name] = (),
    types: LayerTypes = ("linear", "conv"),
    head: bool = False,
    prefix: str = "masks",
) -> dict[str, nn.Parameter]:
    """Return the parameters that may be masked, by their names in `net.named_parameters()`.

    Patterns are shell patterns of module names (`blocks.*.conv1`); one without a match raises UserError. `types` are
    linear, conv, embedding, norm (their weights) and bias (the biases of the chosen layers). The head (`head_of`) stays
    dense unless `head` is True. Tied parameters are chosen once. In a partly frozen net, frozen parameters are left out
    unless `layers` name them: training could not compensate for their loss.
    """
    kinds = tuple(kind for name in types if name != "bias" for kind in _TYPES[name])
    modules = {name: module for name, module in net.named_modules() if isinstance(module, kinds)}
    last = head_of(net)
    for key, patterns in (("layers", layers or ()), ("exclude", exclude)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in modules):
                near = ", ".join(list(modules)[:6]) or "none"
                raise UserError(
                    f"{prefix}.{key}: {pattern} matches no layer of the types {', '.join(types)}: layers are {near}, "
                    "..."
                )
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    all_taken = layers is not None or not any(parameter.requires_grad for parameter in net.parameters())
    found: dict[str, nn.Parameter] = {}
    for name, module in modules.items():
        if layers is not None and not _matches(name, layers):
            continue
        if _matches(name, exclude) or (module is last and not head):
            continue
        for own in ("weight", "bias") if "bias" in types else ("weight",):
            parameter = getattr(module, own, None)
            if isinstance(parameter, nn.Parameter) and (parameter.requires_grad or all_taken):
                found[names[id(parameter)]] = parameter
    return found


def weights_of(
    net: nn.Module, layers: Sequence[str] | None = None, exclude: Sequence[str] = ()
) -> dict[str, nn.Parameter]:
    """Return the weights of the net, or of modules that match `layers` but not `exclude`, by name.

    A weight has at least two dimensions; with a first dimension of 1, such as learned positions, it counts as a bias.
    """
    found = {}
    for name, parameter in net.named_parameters():
        parts = name.split(".")  # conv.parametrizations.weight.original1 is a weight of conv
        modules = [".".join(parts[:end]) for end in range(len(parts))]
        wanted = layers is None or any(_matches(module, layers) for module in modules)
        wanted &= not any(_matches(module, exclude) for module in modules)
        if wanted and parameter.dim() > 1 and parameter.shape[0] > 1:
            found[name] = parameter
    return found


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def head_of(net: nn.Module) -> nn.Module | None:
    """Return the layer of the logits: the last linear layer, else convolution, of `net.head` or the net."""
    head = getattr(net, "head", None)
    within = list((head if isinstance(head, nn.Module) else net).modules())
    for kinds in ((nn.Linear,), _CONV):
        found = [module for module in within if isinstance(module, kinds)]
        if found:
            return found[-1]
    return None


def zero_share(net: nn.Module) -> float:
    """Return the share of exact zeros among the maskable weights: the sparsity of a net without masks."""
    weights = maskable(net).values()
    return sum(int((weight == 0).sum()) for weight in weights) / max(sum(weight.numel() for weight in weights), 1)
