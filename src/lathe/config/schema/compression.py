"""Methods of compression."""

from dataclasses import replace

from lathe.config.schema.rule import (
    Rule,
    anything,
    count,
    flag,
    group,
    items,
    node,
    null,
    number,
    share,
    steps,
    text,
    whole,
    word,
)
from lathe.config.schema.strategies import KINDS

_seed = whole(0, 2**32 - 1)
_share = Rule("number", low=0, high=1, saying="a share of the method's steps from 0 to 1")
_batches = whole(1, 1_000_000).of("training batches")
_kind: dict[str, Rule] = {"kind": word(*KINDS)}
_patterns = items(text("a name's pattern"))
_layers: dict[str, Rule] = {
    "layers": items(text("a name's pattern"), 1) | None,
    "exclude": _patterns | None,
    "types": items(word("linear", "conv", "embedding", "norm", "bias"), 1) | None,
    "head": flag,
}
_schedule: dict[str, Rule] = {
    "schedule": word("one_shot", "linear", "cubic", "exponential", "stepped"),
    "initial_sparsity": number(0, below=1),
    "start": _share,
    "end": _share,
    "every_n_steps": steps | null("a hundredth of the way from start to end"),
    "jumps": whole(1, 1_000_000),
    "batches": _batches,
    "seed": _seed,
}
_scope = word("global", "layer", "output")
_criterion = word("magnitude", "random", "batchnorm", "taylor", "movement", "wanda")
_sparsity = number(above=0, below=1)
_bits = whole(2, 8).of("bits")
_in_float = _bits | null("layers that stay in float")
_ptq: dict[str, Rule] = {"layer_bits": group(_in_float) | None, "exclude": _patterns | None, "weight_bits": _bits}
_methods = ("kd", "dkd", "dist", "fitnets", "attention", "rkd", "crd")
_m = "|".join(_methods)
_positive = number(above=0)
_chosen = text("a layer's name") | items(anything, 1) | None

COMPRESSION: dict[str, dict[str, Rule]] = {
    "lathe.callbacks.Prune": {
        **_kind,
        **_layers,
        **_schedule,
        "sparsity": _sparsity,
        "scope": _scope,
        "criterion": _criterion,
        "norm": _positive,
        "granularity": word("unstructured", "structured", "block", "n_m"),
        "n": count,
        "m": count,
        "block": items(count, 2, 2),
    },
    "lathe.callbacks.PruneNM": {
        **_kind,
        **_layers,
        **_schedule,
        "n": count,
        "m": count,
        "scope": _scope,
        "criterion": _criterion,
    },
    "lathe.callbacks.PruneStructured": {
        **_kind,
        **_layers,
        **_schedule,
        "sparsity": _sparsity,
        "scope": _scope,
        "criterion": _criterion,
        "norm": _positive,
    },
    "lathe.callbacks.PruneChannels": {
        **_kind,
        "budget": word("macs", "parameters", "latency"),
        "share": number(above=0, below=1),
        "mode": word("gradual", "one_shot"),
        "importance": word("group_norm", "l1", "l2", "bn_scale", "taylor", "random"),
        "scope": word("global", "local"),
        "round_to": whole(1, 65536) | null("8 in wide layers, 4 in narrow ones"),
        "min_channels": whole(1, 65536),
        "start": _share,
        "end": _share,
        "regularise": word("group_norm", "group_lasso", "bn_scale") | null("no push"),
        "strength": _positive,
        "exclude": _patterns,
        "latency_batch": whole(1, 65536).of("samples"),
    },
    "lathe.callbacks.Lottery": {
        **_kind,
        **_layers,
        "sparsity": _sparsity,
        "rounds": whole(2, 1000).of("trainings"),
        "rewind": whole(0).of("optimizer steps") | Rule("number", low=0, below=1, saying="a share of a round below 1"),
        "scope": word("global", "layer"),
    },
    "lathe.callbacks.RigL": {
        **_kind,
        **_layers,
        "sparsity": _sparsity,
        "densities": word("erk", "uniform"),
        "growth": word("gradient", "random"),
        "fraction": number(above=0, below=1),
        "every_n_steps": steps,
        "end": replace(_share, low=None, above=0, saying="a share of the method's steps above 0 and up to 1"),
        "initial": word("random", "magnitude"),
        "seed": _seed,
    },
    "lathe.callbacks.QAT": {
        **_kind,
        "bits": _bits,
        "activation_bits": _bits | null("floats"),
        "per_channel": flag,
        "lsq": flag,
        "layer_bits": group(_in_float) | None,
        "exclude": _patterns | None,
        "start": _share,
        "freeze_observers": _share | null("never"),
        "freeze_batchnorm": _share | null("never"),
        "observer": word("minmax", "moving_average", "percentile"),
        "percentile": number(above=50, high=100),
    },
    "lathe.callbacks.PTQStatic": {
        **_kind,
        **_ptq,
        "batches": _batches,
        "observer": word("minmax", "percentile", "entropy"),
        "percentile": number(above=50, high=100),
        "activation_bits": _bits,
        "per_channel": flag,
        "equalize": flag,
        "bias_correction": flag,
    },
    "lathe.callbacks.PTQDynamic": {**_kind, **_ptq, "activation_bits": _bits, "per_channel": flag},
    "lathe.callbacks.WeightOnly": {
        **_kind,
        **_ptq,
        "group_size": whole(2, 2**31).of("weights that share a scale") | null("one scale for each output channel"),
        "bias_correction": flag,
        "batches": _batches,
    },
    "lathe.callbacks.Distill": {
        **_kind,
        "teacher": text("a run directory") | group() | items(anything, 1) | node | None,
        "method": word(*_methods) | items(word(*_methods), 1) | text("several joined by +", rf"({_m})(\+({_m}))+"),
        "alpha": share | None,
        "weight": _positive | group(_positive) | None,
        "temperature": _positive,
        "warmup": _share,
        "teacher_weights": items(_positive, 1) | None,
        "ema_decay": number(0, below=1),
        "target_weight": number(0),
        "other_weight": number(0),
        "between_weight": number(0),
        "within_weight": number(0),
        "distance_weight": number(0),
        "angle_weight": number(0),
        "crd_features": whole(1, 2**20),
        "crd_queue": whole(0, 2**31),
        "crd_temperature": _positive,
        "student_layers": _chosen,
        "teacher_layers": _chosen,
        "cache": number(0).of("MiB"),
    },
}
