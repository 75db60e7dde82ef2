"""Callbacks that contradict other keys."""

from collections.abc import Iterator, Mapping
from typing import Any

from lathe.config.schema.names import canonical
from lathe.config.values import shown

CUT = ("Pipeline", "ThreeD")  # strategies under which no process has the whole net


def _callbacks(cfg: Mapping[str, Any], kind: str) -> dict[str, Any]:
    nodes = {name: node for name, node in cfg["callbacks"].items() if node}
    return {name: node for name, node in nodes.items() if canonical(str(node.get("_target_"))) == kind}


def averaging(cfg: Mapping[str, Any]) -> Iterator[str]:
    """The average of a net that no process has."""
    strategy = str(cfg["strategy"].get("_target_")).rpartition(".")[2]
    averaged = list(_callbacks(cfg, "lathe.callbacks.EMA"))
    if averaged and (strategy in CUT or (strategy == "DeepSpeed" and cfg["strategy"].get("stage") == 3)):
        yield (
            f"callbacks.{averaged[0]} can't average a net that strategy {strategy} cuts between processes: leave it "
            "out, or use strategy=fsdp or ddp."
        )


def samples(cfg: Mapping[str, Any]) -> Iterator[str]:
    """A page of a validation or a test that is left out."""
    for name, node in _callbacks(cfg, "lathe.callbacks.Samples").items():
        split, limit = node.get("split"), f"limit_{node.get('split')}_batches"
        if split in ("val", "test") and not cfg["trainer"].get(limit, 1.0):
            yield (
                f"callbacks.{name}.split={split} shows samples of batches that trainer.{limit}=0 leaves out: give "
                "another limit, another split, or leave the callback out."
            )
        if node.get("split") == "test" and cfg.get("test") is False:
            yield f"callbacks.{name}.split=test comes with the run's test, and test=false: use split=val, or test=true."


def alerts(cfg: Mapping[str, Any]) -> Iterator[str]:
    """What nobody measures."""
    for name, node in _callbacks(cfg, "lathe.callbacks.Alerts").items():
        if node.get("throughput_drop") is not None and cfg["callbacks"].get("throughput") is None:
            yield (
                f"callbacks.{name}.throughput_drop={shown(node['throughput_drop'])} needs callbacks.throughput, which "
                "measures it: add it to callbacks, or set throughput_drop=null."
            )


def whitening(cfg: Mapping[str, Any]) -> Iterator[str]:
    """A net of ours without a layer to whiten; those of others are looked at when a fit begins."""
    net = cfg["model"].get("net")
    target = canonical(str(net.get("_target_"))) if isinstance(net, Mapping) else ""
    for name, node in _callbacks(cfg, "lathe.callbacks.Whitening").items():
        settles = node.get("settle_epoch") is not None
        if settles and cfg["compile"].get("enabled"):
            yield (
                f"callbacks.{name}.settle_epoch={node['settle_epoch']} takes a weight out of training, which compiled "
                "code does not follow: use compile=none, or null."
            )
        if target.startswith("lathe.nets.") and target != "lathe.nets.Airbench":
            kind = target.rpartition(".")[2]
            yield f"callbacks.{name}: {kind} has no layer to whiten: use model=airbench, or leave it out."


def hard_samples(cfg: Mapping[str, Any]) -> Iterator[str]:
    """Steps whose logits nobody has, and samples that are mixed."""
    for name in _callbacks(cfg, "lathe.callbacks.HardSamples"):
        strategy = str(cfg["strategy"].get("_target_")).rpartition(".")[2]
        out = f"leave {name} out of callbacks"
        if strategy in CUT:
            yield f"callbacks.{name} reads the logits of each step, which strategy {strategy} has on no process: {out}."
        if cfg["compile"].get("enabled") and cfg["compile"].get("scope", "net") == "step":
            yield (
                f"callbacks.{name} reads the logits of each step, which compile.scope=step keeps within one function: "
                f"use compile.scope=net, or {out}."
            )
        augment = cfg["data"].get("augment")
        mixing = [key for key in ("mixup", "cutmix") if isinstance(augment, Mapping) and augment.get(key)]
        if mixing:
            yield (
                f"data.augment.{mixing[0]}={shown(augment[mixing[0]])} mixes samples, and callbacks.{name} chooses by "
                f"the loss of each: use 0, or {out}."
            )


def image_sizes(cfg: Mapping[str, Any]) -> Iterator[str]:
    """Scales that make nothing smaller, and nets that have one size."""
    for name, node in _callbacks(cfg, "lathe.callbacks.ImageSizes").items():
        scales, out = node.get("scales"), f"leave {name} out of callbacks"
        strategy = str(cfg["strategy"].get("_target_")).rpartition(".")[2]
        if strategy in CUT:
            yield f"callbacks.{name}: strategy {strategy} cuts a net for one size of images: {out}."
        if cfg["compile"].get("enabled"):
            yield f"callbacks.{name}: compiled code is made for one size of images: use compile=none, or {out}."
        if canonical(str(cfg["task"].get("_target_"))) == "lathe.tasks.LightningTask":
            yield (
                f"callbacks.{name} makes the images smaller that a task hands to its net, and task=lightning has a "
                f"LightningModule as it is: {out}."
            )
        if isinstance(scales, list) and all(scale == 1 for scale in scales):
            yield f"callbacks.{name}.scales={shown(scales)} makes no image smaller: choose one below 1, or {out}."
