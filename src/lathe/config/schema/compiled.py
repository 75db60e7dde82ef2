"""What goes together with compiled code: with a step that is one function, `compile.scope=step`, and with activations
that are moved meanwhile.
"""

from collections.abc import Iterator, Mapping
from typing import Any

MASKS = ("prune", "prune_nm", "prune_structured")  # methods that act on weights after a step, and nowhere else


def whole_step(cfg: Mapping[str, Any]) -> Iterator[str]:
    """What a step that is one compiled function has no place for."""
    compiled, trainer = cfg["compile"], cfg["trainer"]
    if not compiled.get("enabled") and "mode" not in compiled:  # compile=none, to which somebody added something
        for name, value in compiled.items():
            if name != "enabled":
                yield (
                    f"compile.{name}={value} has no effect with compile=none, which compiles nothing: add "
                    f"compile=default, or leave it out, in an experiment with ~compile.{name}."
                )
    if not compiled.get("enabled") or compiled.get("scope", "net") != "step":
        return
    key, way = "compile.scope=step", "or use compile.scope=net"
    if compiled.get("regional") is True:
        yield f"compile.regional=true compiles the blocks of a net alone, and {key} the whole step: drop one."
    if trainer["accumulate_grad_batches"] != 1:
        yield (
            f"trainer.accumulate_grad_batches={trainer['accumulate_grad_batches']}: {key} has the optimizer's update "
            f"in every step: use 1, {way}."
        )
    if cfg["precision"]["name"] == "16-mixed":
        yield (
            f"precision=16-mixed scales the loss by what it finds in the gradients, for which {key} has no place: use "
            f"precision=bf16-mixed, {way}."
        )
    if trainer.get("steps_per_call", "auto") == 1:
        yield f"trainer.steps_per_call=1 makes steps in Lightning's way, and {key} does not: use auto, {way}."
    if trainer.get("profiler"):
        yield f"trainer.profiler={trainer['profiler']} measures Lightning's parts of a step, {key} has none: drop one."
    if trainer.get("detect_anomaly"):
        yield f"trainer.detect_anomaly=true looks at operations one by one, and {key} makes them one: drop one."
    devices, target = trainer["devices"], cfg["strategy"].get("_target_")
    several = len(devices) > 1 if isinstance(devices, list) else devices not in (1, -1, "auto")
    if target not in (None, "lathe.strategies.auto") or several or trainer["num_nodes"] != 1:
        yield f"{key} is for one process, strategy=auto with trainer.devices=1: use these, {way}."
    if trainer.get("activation_checkpointing", "none") != "none":
        yield f"trainer.activation_checkpointing={trainer['activation_checkpointing']} is not for {key}: drop one."
    for name, made in cfg["compression"].items():
        if isinstance(made, Mapping) and name not in MASKS:
            yield f"compression={name} acts within a step, which {key} makes one function: leave it out, {way}."


# Strategies that leave a block's activations plain tensors of one device, which is what can be moved
MOVABLE = ("auto", "DDP", "FSDP", "ModelSplit")


def offloading(cfg: Mapping[str, Any]) -> Iterator[str]:
    """What `trainer.activation_checkpointing=offload` has no place in."""
    if cfg["trainer"].get("activation_checkpointing", "none") != "offload":
        return
    key, way = "trainer.activation_checkpointing=offload", "or use trainer.activation_checkpointing=blocks"
    if cfg["compile"].get("enabled"):
        yield f"{key} acts between operations, which compile makes one: use compile=none, {way}."
    target = cfg["strategy"].get("_target_", "lathe.strategies.auto")
    if target.startswith("lathe.") and target.rpartition(".")[2] not in MOVABLE:
        yield (
            f"{key} works with strategy=auto, ddp, fsdp and model_split, not with {target.rpartition('.')[2]}: use one "
            f"of these, {way}."
        )
