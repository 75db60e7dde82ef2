"""Keys of a training configuration that contradict each other, or of which one would do nothing."""

from collections.abc import Iterator, Mapping
from typing import Any

from lathe.schema.names import canonical
from lathe.schema.rule import shown

CUT = ("Pipeline", "ThreeD")  # strategies under which no process has the whole net


def contradictions(cfg: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each contradiction in a resolved training configuration whose single values are all taken."""
    yield from _lengths(cfg["trainer"])
    yield from _optimizer(cfg)
    yield from clashes(cfg)
    if cfg.get("ckpt_mode") == "trainer" and cfg.get("ckpt_path") is None and cfg.get("resume") is None:
        yield "ckpt_mode=trainer says what is taken from ckpt_path, which is null: set ckpt_path, or leave ckpt_mode out."
    devices = cfg["trainer"].get("devices")
    if isinstance(devices, list) and len(set(devices)) < len(devices):
        yield f"trainer.devices={devices} names a device twice: name each once."
    named = cfg["strategy"].get("devices")
    same = named == devices or (isinstance(named, list) and len(named) == devices)
    if cfg["strategy"].get("processes") == "one" and devices not in (1, -1, "auto") and not same:
        yield (f"trainer.devices={shown(devices)} has no say where one process drives several devices: leave it out, and name them with "
               "strategy.devices.")  # fmt: skip
    strategy = str(cfg["strategy"].get("_target_")).rpartition(".")[2]
    nodes = {name: node for name, node in cfg["callbacks"].items() if node}
    averaged = [name for name, node in nodes.items() if canonical(str(node.get("_target_"))) == "lathe.callbacks.EMA"]
    if averaged and (strategy in CUT or (strategy == "DeepSpeed" and cfg["strategy"].get("stage") == 3)):
        yield (f"callbacks.{averaged[0]} can't average a net that strategy {strategy} cuts between processes: leave it out, or use "
               "strategy=fsdp or ddp.")  # fmt: skip


def _lengths(trainer: Mapping[str, Any]) -> Iterator[str]:
    epochs, steps = trainer.get("max_epochs"), trainer.get("max_steps", -1)
    if epochs is None and steps == -1 and trainer.get("max_time") is None:
        yield "trainer.max_epochs=null needs an end: set trainer.max_steps or trainer.max_time."
    for least, most, limit in (("min_epochs", "max_epochs", epochs), ("min_steps", "max_steps", steps)):
        number = trainer.get(least)
        if number is not None and limit not in (None, -1) and number > limit:
            yield f"trainer.{least}={number} is above trainer.{most}={limit}, which ends the run first: lower one or raise the other."
    interval, every = trainer.get("val_check_interval"), trainer.get("check_val_every_n_epoch", 1)
    if every is None and isinstance(interval, float):
        yield (f"trainer.check_val_every_n_epoch=null counts batches across epochs, and trainer.val_check_interval={interval} is a share "
               "of one: give a number of batches, such as trainer.val_check_interval=100.")  # fmt: skip
    clip, how = trainer.get("gradient_clip_val"), trainer.get("gradient_clip_algorithm")
    if not clip and how == "value":
        yield (f"trainer.gradient_clip_algorithm=value clips nothing with trainer.gradient_clip_val={shown(clip)}: set that one too, or "
               "leave this out.")  # fmt: skip


def _optimizer(cfg: Mapping[str, Any]) -> Iterator[str]:
    optimizer = cfg["optimizer"]
    if optimizer.get("nesterov") is True and (optimizer.get("momentum") == 0 or optimizer.get("dampening")):
        yield "optimizer.nesterov=true needs a momentum above 0 and no dampening: set optimizer.nesterov=false."
    if optimizer.get("foreach") is True and optimizer.get("fused") is True:
        yield "optimizer.foreach=true and optimizer.fused=true exclude each other: set one of them to null."
    if optimizer.get("fused") is True and cfg["precision"].get("name") == "16-mixed" and cfg["trainer"].get("gradient_clip_val"):
        yield (f"optimizer.fused=true unscales the gradients of precision=16-mixed in its own step, behind trainer.gradient_clip_val="
               f"{cfg['trainer']['gradient_clip_val']}: use optimizer.fused=false, or another precision.")  # fmt: skip


def clashes(cfg: Mapping[str, Any]) -> Iterator[str]:
    """Those of precision and strategy, which a job on a finished run chooses anew."""
    precision, taken = cfg["precision"], cfg["strategy"].get("precisions")
    strategy, name = str(cfg["strategy"].get("_target_")).rpartition(".")[2], precision.get("name")
    if taken is not None and name not in taken:
        yield f"precision.name={name}: strategy {strategy} takes {', '.join(taken)}; choose one of them or another strategy."
    scaling = [key for key in ("init_scale", "growth_interval") if key in precision]
    if scaling and name != "16-mixed":
        yield f"precision.{scaling[0]} is of the gradient scaler that precision=16-mixed alone has: leave it out, or choose that."
