"""Callbacks that contradict other keys."""

from collections.abc import Iterator, Mapping
from typing import Any

from lathe.config.schema.names import canonical
from lathe.config.schema.rule import shown

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
    """A page of a test that is left out."""
    for name, node in _callbacks(cfg, "lathe.callbacks.Samples").items():
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
    for name in _callbacks(cfg, "lathe.callbacks.Whitening"):
        if target.startswith("lathe.nets.") and target != "lathe.nets.Airbench":
            kind = target.rpartition(".")[2]
            yield f"callbacks.{name}: {kind} has no layer to whiten: use model=airbench, or leave it out."
