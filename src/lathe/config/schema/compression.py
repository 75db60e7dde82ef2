"""Methods of compression."""

from lathe.config.schema.rule import Rule, anything, count, flag, group, items, node, number, share, text, whole, word
from lathe.config.schema.strategies import KINDS

_seed = whole(0, 2**32 - 1)
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
    "start": share,
    "end": share,
    "every_n_steps": count | None,
    "jumps": whole(1, 1_000_000),
    "batches": whole(1, 1_000_000),
    "seed": _seed,
}
_scope = word("global", "layer", "output")
_criterion = word("magnitude", "random", "batchnorm", "taylor", "movement", "wanda")
_sparsity = number(0, below=1)
_bits = whole(2, 8)
_ptq: dict[str, Rule] = {"layer_bits": group(_bits | None) | None, "exclude": _patterns | None, "weight_bits": _bits}
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
        "round_to": whole(1, 65536) | None,
        "min_channels": whole(1, 65536),
        "start": share,
        "end": share,
        "regularise": word("group_norm", "group_lasso", "bn_scale") | None,
        "strength": _positive,
        "exclude": _patterns,
        "latency_batch": whole(1, 65536),
    },
    "lathe.callbacks.Lottery": {
        **_kind,
        **_layers,
        "sparsity": number(above=0, below=1),
        "rounds": whole(2, 1000),
        "rewind": whole(0) | number(0, below=1),
        "scope": word("global", "layer"),
    },
    "lathe.callbacks.RigL": {
        **_kind,
        **_layers,
        "sparsity": number(above=0, below=1),
        "densities": word("erk", "uniform"),
        "growth": word("gradient", "random"),
        "fraction": number(above=0, below=1),
        "every_n_steps": count,
        "end": number(above=0, high=1),
        "initial": word("random", "magnitude"),
        "seed": _seed,
    },
    "lathe.callbacks.QAT": {
        **_kind,
        "bits": _bits,
        "activation_bits": _bits | None,
        "per_channel": flag,
        "lsq": flag,
        "layer_bits": group(_bits | None) | None,
        "exclude": _patterns | None,
        "start": share,
        "freeze_observers": share | None,
        "freeze_batchnorm": share | None,
        "observer": word("minmax", "moving_average", "percentile"),
        "percentile": number(above=50, high=100),
    },
    "lathe.callbacks.PTQStatic": {
        **_kind,
        **_ptq,
        "batches": whole(1, 1_000_000),
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
        "group_size": whole(2, 2**31) | None,
        "bias_correction": flag,
        "batches": whole(1, 1_000_000),
    },
    "lathe.callbacks.Distill": {
        **_kind,
        "teacher": text("a run directory") | group() | items(anything, 1) | node | None,
        "method": word(*_methods) | items(word(*_methods), 1) | text("several joined by +", rf"({_m})(\+({_m}))+"),
        "alpha": share | None,
        "weight": _positive | group(_positive) | None,
        "temperature": _positive,
        "warmup": share,
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
        "cache": number(0),
    },
}
