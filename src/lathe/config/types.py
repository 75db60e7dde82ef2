"""Types for the keys of components: what a constructor is annotated with is what the configuration takes.

    class EMA(Callback):
        @validated
        def __init__(self, decay: ShareBelowOne = 0.999, every_n_steps: Count = 1) -> None: ...

For a range that has no name here, write `Annotated[int, Field(ge=2, le=8)]`; for a choice, `Literal["min", "max"]`.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, get_args

from pydantic import Field

Count = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Bits = Annotated[int, Field(ge=2, le=8)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
OpenShare = Annotated[float, Field(gt=0, lt=1)]
StepOrShare = NonNegativeInt | ShareBelowOne  # an optimizer step, or a share of the run
Betas = Annotated[Sequence[ShareBelowOne], Field(min_length=2, max_length=2)]
Name = Annotated[str, Field(min_length=1)]
Url = Annotated[str, Field(pattern=r"^(https?|file)://\S+$", description="an address such as https://...")]
SomeNames = Annotated[Sequence[Name], Field(min_length=1)]
Checkpoint = (
    Literal["best", "last"]
    | Annotated[
        str,
        Field(
            pattern=r"^(epoch=\d+-step=\d+|own/[^/]+)$",
            description="the name of one that save_top_k kept, or own/<name>",
        ),
    ]
)
PrecisionName = Literal["64-true", "32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true"]
# Of pruning
Criterion = Literal["magnitude", "random", "batchnorm", "taylor", "movement", "wanda"]
MaskScope = Literal["global", "layer", "output"]
SparsityCurve = Literal["one_shot", "linear", "cubic", "exponential", "stepped"]
LayerTypes = Annotated[Sequence[Literal["linear", "conv", "embedding", "norm", "bias"]], Field(min_length=1)]
ChannelBudget = Literal["macs", "parameters", "latency"]
ChannelImportance = Literal["group_norm", "l1", "l2", "bn_scale", "taylor", "random"]
# Of distillation
DistillationMethod = Literal["kd", "dkd", "dist", "fitnets", "attention", "rkd", "crd"]
SomeDistillationMethods = Annotated[list[DistillationMethod], Field(min_length=1)]
_METHODS = "|".join(get_args(DistillationMethod))
JoinedDistillationMethods = Annotated[
    str, Field(pattern=rf"^({_METHODS})(\+({_METHODS}))+$", description="several joined by +")
]
