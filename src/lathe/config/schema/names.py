"""One name for each class and function that a configuration can build: that of its room's face, lathe.callbacks.EMA.

Files inside a room may move; what stands in the config.yaml of a run that was made earlier keeps its meaning by the
table here.
"""

from collections.abc import Callable
from typing import Any

# Names by the face that they stand on now and the module through which an older configuration has named them.
_FACES: dict[str, dict[str, str]] = {
    "lathe.callbacks": {
        "lathe.callbacks.channels": "PruneChannels",
        "lathe.callbacks.checkpoint": "Checkpoint",
        "lathe.callbacks.distill": "Distill",
        "lathe.callbacks.ema": "EMA",
        "lathe.callbacks.lottery": "Lottery",
        "lathe.callbacks.model_summary": "ModelSummary",
        "lathe.callbacks.nan_guard": "NanGuard",
        "lathe.callbacks.preemption": "Preemption",
        "lathe.callbacks.profiler": "TorchProfiler",
        "lathe.callbacks.progress": "Progress",
        "lathe.callbacks.pruning": "Prune PruneNM PruneStructured",
        "lathe.callbacks.ptq": "PTQDynamic PTQStatic WeightOnly",
        "lathe.callbacks.qat": "QAT",
        "lathe.callbacks.rigl": "RigL",
        "lathe.callbacks.throughput": "Throughput",
    },
    "lathe.data": {
        "lathe.data.augment": "Augment",
        "lathe.data.cifar": "Cifar",
        "lathe.data.digits": "Digits",
        "lathe.data.documents": "DocumentDataModule",
        "lathe.data.module": "ImageDataModule",
        "lathe.data.shards": "ShardDataModule Shards",
        "lathe.data.synthetic": "Synthetic",
        "lathe.data.synthetic_documents": "SyntheticDocuments",
        "lathe.data.synthetic_tokens": "SyntheticTokens",
        "lathe.data.token_file": "TokenFiles",
        "lathe.data.tokens": "TokenDataModule",
    },
    "lathe.legacy": {
        "lathe.strategies": "DP Horovod",
        "lathe.strategies.dp": "DP",
        "lathe.strategies.horovod": "Horovod",
    },
    "lathe.nets": {
        "lathe.nets.deep_mlp": "DeepMLP",
        "lathe.nets.gpt": "GPT",
        "lathe.nets.mlp": "MLP",
        "lathe.nets.resnet": "CifarResNet ResNet",
        "lathe.nets.vit": "ViT",
        "lathe.nets.wideresnet": "WideResNet",
    },
    "lathe.optim": {
        "lathe.optim.build": "build_optimizer",
        "lathe.optim.muon": "Muon",
        "lathe.optim.schedules": "constant cosine cosine_restarts one_cycle step",
    },
    "lathe.strategies": {
        "lathe.strategies.deepspeed": "DeepSpeed",
        "lathe.strategies.fsdp": "FSDP",
        "lathe.strategies.model_split": "ModelSplit",
        "lathe.strategies.parallel": "DDP auto",
        "lathe.strategies.pipeline": "Pipeline",
        "lathe.strategies.three_d": "ThreeD",
    },
    "lathe.tasks": {
        "lathe.tasks.classification": "ClassificationTask",
        "lathe.tasks.language_modelling": "LanguageModellingTask",
    },
}
# What to write now, by each older name.
RENAMED: dict[str, str] = {
    f"{module}.{name}": f"{face}.{name}"
    for face, modules in _FACES.items()
    for module, names in modules.items()
    for name in names.split()
} | {
    # which had torch's own name
    "lathe.strategies.Tensor": "lathe.strategies.TensorParallel",
    "lathe.strategies.tensor.Tensor": "lathe.strategies.TensorParallel",
}


def canonical(target: str) -> str:
    """The name in the tables of the class at a dotted path, whose file may be named or left out:
    lathe.callbacks.ema.EMA is lathe.callbacks.EMA, lightning.pytorch.callbacks.EarlyStopping is
    lightning.EarlyStopping."""
    target = RENAMED.get(target, target)
    words = target.split(".")
    root, name = words[0], words[-1]
    if root in ("lightning", "pytorch_lightning"):
        return f"lightning.{name}"
    return f"{root}.{words[1]}.{name}" if root in ("lathe", "torch") and len(words) > 2 else target


NET = ("init", "net", "name", "pretrained", "sha256")  # the keys of `model`


def current(config: Any) -> Any:
    """A whole configuration under the names of now, and its task apart from its net: an earlier one, or a model's file
    that names its task, has the task's keys beside the net, under `model`."""
    config = renamed(config)
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict) or set(model) <= set(NET):
        return config
    task = config.get("task") or {}
    own = NET if "lathe.tasks." in str(model.get("_target_", "lathe.tasks.")) else ("net",)
    given = {key: value for key, value in model.items() if key not in own}
    known = task if given.get("_target_", task.get("_target_")) == task.get("_target_") else {}
    moved = {"task": {**known, **given}, "model": {key: model[key] for key in own if key in model}}
    return {key: moved.get(key, value) for key, value in ({"task": None} | config).items()}


def moved(key: str) -> str:
    """Where a key of a command line stands now: one of `model` that is none of its own is the task's."""
    group, _, name = key.partition(".")
    return f"task.{name}" if group == "model" and name and name.split(".")[0] not in NET else key


def renamed(tree: Any, tell: Callable[[str, str, str], None] | None = None, key: str = "") -> Any:
    """A copy of a configuration in which each part has its name of now. `tell` is called with the key, the older name
    and that of now.
    """
    if isinstance(tree, list):
        return [renamed(item, tell, f"{key}[{number}]") for number, item in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    getter = str(tree.get("_target_")).startswith("hydra.utils.get_")  # what counts is the name that it is given
    found = {}
    for name, value in tree.items():
        below = f"{key}.{name}" if key else str(name)
        if isinstance(value, str) and value in RENAMED and (name == "_target_" or (getter and name == "path")):
            if tell is not None:
                tell(below, value, RENAMED[value])
            value = RENAMED[value]
        found[name] = renamed(value, tell, below)
    return found
