"""Optimizers, by the class that `optimizer.kind.path` names, and schedules."""

from dataclasses import replace

from lathe.config.schema.rule import (
    Rule,
    count,
    flag,
    group,
    items,
    node,
    null,
    number,
    only,
    share,
    steps,
    text,
    whole,
    word,
)

# Beside the options of the class in OPTIMIZERS below.
OPTIMIZER: dict[str, Rule] = {
    "_partial_": only[True],
    "kind": node,
    "lr": number(above=0) | null("the class's own"),
    "weight_decay": number(0) | null("the class's own"),
    "no_decay": items(text("a pattern")) | text("a pattern") | null("all decay"),
    "scale_lr": word("none", "linear", "sqrt"),
    "reference_batch_size": count.of("samples") | None,
    "batch_size": count.of("samples") | None,
    "layer_decay": number(above=0, high=1) | null("one rate for all layers"),
    "lr_scale": group(number(above=0)) | null("one rate for all"),
}
_share = Rule("number", low=0, below=1, saying="a share of the run below 1")
_position = whole(0).of("optimizer steps") | _share
_schedule = {"_partial_": only[True], "warmup": _position}
# Beside a scheduler, its own keys apart: when it is stepped, and with what.
PLAN: dict[str, Rule] = {
    "interval": word("step", "epoch"),
    "frequency": count.of("optimizer steps, epochs or validations"),
    "monitor": text("a metric's name"),
}
PLATEAU: dict[str, Rule] = {  # torch's ReduceLROnPlateau, whose `mode` may also follow the metric
    "_partial_": only[True],
    "monitor": text("a metric's name"),
    "mode": word("auto", "max", "min"),
    "factor": number(above=0, below=1),
    "patience": whole(0).of("validations"),
    "threshold": number(0),
    "threshold_mode": word("rel", "abs"),
    "cooldown": whole(0).of("validations"),
    "min_lr": number(0) | items(number(0)),
    "eps": number(0),
    "frequency": count.of("validations"),
}
SCHEDULERS: dict[str, dict[str, Rule]] = {
    "lathe.optim.constant": _schedule,
    "lathe.optim.cosine": {**_schedule, "min_ratio": share},
    "lathe.optim.cosine_restarts": {
        **_schedule,
        "period": steps | replace(_share, low=None, above=0, saying="a share of the run above 0 and below 1"),
        "period_growth": number(1, 1000),
        "min_ratio": share,
    },
    "lathe.optim.linear": {**_schedule, "end_ratio": share},
    "lathe.optim.one_cycle": {**_schedule, "start_ratio": share, "end_ratio": share},
    "lathe.optim.step": {**_schedule, "milestones": items(_position), "gamma": share},
}

_decayed = number(0, below=1)
_betas = items(_decayed, 2, 2)
_eps = number(0)
_how = {"maximize": flag, "foreach": flag | None, "differentiable": flag, "capturable": flag}
# The options of torch's optimizers beside lr and weight_decay, by the class that optimizer.kind.path names.
OPTIMIZERS: dict[str, dict[str, Rule]] = {
    "torch.optim.SGD": {
        "momentum": _decayed,
        "dampening": number(),
        "nesterov": flag,
        "maximize": flag,
        "foreach": flag | None,
        "differentiable": flag,
        "fused": flag | None,
    },
    "torch.optim.Adam": {
        "betas": _betas,
        "eps": _eps,
        "amsgrad": flag,
        **_how,
        "fused": flag | None,
        "decoupled_weight_decay": flag,
    },
    "torch.optim.AdamW": {"betas": _betas, "eps": _eps, "amsgrad": flag, **_how, "fused": flag | None},
    "torch.optim.NAdam": {
        "betas": _betas,
        "eps": _eps,
        "momentum_decay": number(0),
        "decoupled_weight_decay": flag,
        **_how,
    },
    "torch.optim.RAdam": {"betas": _betas, "eps": _eps, "decoupled_weight_decay": flag, **_how},
    "torch.optim.Adamax": {"betas": _betas, "eps": _eps, **_how},
    "torch.optim.Adadelta": {"rho": share, "eps": _eps, **_how},
    "torch.optim.RMSprop": {"alpha": _decayed, "eps": _eps, "momentum": number(0), "centered": flag, **_how},
    "lathe.optim.LAMB": {"betas": _betas, "eps": _eps},
    "lathe.optim.LARS": {
        "momentum": _decayed,
        "nesterov": flag,
        "trust_coefficient": number(above=0),
        "eps": _eps,
    },
    "lathe.optim.Muon": {
        "momentum": _decayed,
        "nesterov": flag,
        "ns_steps": whole(1, 99),
        "adjust_lr_fn": word("original", "match_rms_adamw"),
        "adamw_lr_ratio": number(above=0),
        "adamw_betas": _betas,
        "adamw_eps": _eps,
        "normalize": flag,
        "rest": word("adamw", "sgd"),
        "sgd_lr_ratio": number(above=0),
        "sgd_momentum": _decayed,
    },
}
