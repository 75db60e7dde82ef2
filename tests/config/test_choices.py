"""Every choice of configs/: its components can be built, its keys have a schema, and its defaults fit.

Your choices in configs/ compose, and a run with each makes a step.
"""

import copy
import functools
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.choices import ALL, CONFIGS, OURS, YOURS, named_by, names
from support.own_lightning import LitNet
from support.runs import config

import lathe
from lathe.config.compression_plan import methods
from lathe.config.resolve import flatten
from lathe.config.schema import key_schemas, own_targets, problems
from lathe.config.validate import check, check_compression
from lathe.errors import UserError
from lathe.export import TARGETS, get
from lathe.optim.build import factory_of
from lathe.runs.build import make_schedule, make_task
from lathe.runs.instantiate import instantiate
from lathe.tasks import ClassificationTask
from lathe.tasks.scheduler import build_scheduler, check_plan, plan_of
from lathe.training.trainer_setup import make_methods

NOT_TRAINING = ("target", "hydra", "sweep")
TOGETHER = {  # groups whose choices are composed at once
    group: f"{group}=[{','.join(name for name in names(group) if name != 'none' and f'{group}={name}' in OURS)}]"
    for group in ("callbacks", "logger")
}
CHOICES = [choice for choice in OURS if choice.partition("=")[0] not in (*NOT_TRAINING, *TOGETHER)]
CHOICES += TOGETHER.values()
NO_KEYS = [choice for choice in OURS if choice.startswith(("hydra=", "sweep="))]  # of training
FORMATS = [name for name in names("target") if name not in own_targets()]
OWN = ("model=lightning", "task=lightning", "optimizer=none", "data=module")  # a LightningModule has these for itself
NEEDS = {  # values that have no default, or that go with another part
    TOGETHER["callbacks"]: ["callbacks.alerts.throughput_drop=null", "model=airbench"],
    "sweep=optuna": ["sweep.space={optimizer.lr: [0.1]}"],
    "sweep=ablation": ["sweep.remove=[test]"],
}
VERBS = {
    "evaluate": [],
    "receipt": [],
    "sensitivity": [],
    "profile": [],
    "predict": ["input=a.npy", "output=b.csv"],
    "compress": ["compression=ptq_static"],
    "export": [f"target=[{','.join(FORMATS)}]"],
    "serve": [],
}
OTHERS = {
    "lr_find": [],
    "batch_find": [],
    "reproduce": ["run=x"],
    "benchmark": ["suite=scaling"],
    "make_shards": [],
    "prepare_tokens": ["input=x"],
    "support": [],
    "runs": [],
    "gpu_check": [],
    "report": ["runs=x"],
}


def chosen(choice: str) -> dict[str, Any]:
    """The configuration of a choice, with what it goes with."""
    return copy.deepcopy(_composed(choice))


@functools.cache
def _composed(choice: str) -> dict[str, Any]:
    _group, _name = choice.split("=")
    if choice in NEEDS:
        return config(choice, *NEEDS[choice])
    if choice in OWN:
        own = ["data=module", "test=false"] if choice == "data=module" else []
        return config("model=lightning", "model.net={_target_: support.own_lightning.LitNet}", *own)
    if choice == "data=dataset":
        facts = ["data.num_classes=2", "data.channels=1", "data.image_size=4", "data.class_names=[a,b]"]
        return config(choice, "data.train={_target_: support.own_datasets.Pictures}", *facts)
    if choice == "data=image_folder":  # no image is read
        return config(choice, f"data.folder={CONFIGS}")
    return config(choice, *of_text(choice))


def of_text(choice: str) -> list[str]:
    """The data of a net of text, and the net of such data."""
    beside = {"model": ["data=synthetic_tokens"], "data": ["model=gpt_nano"]}.get(choice.partition("=")[0], [])
    return beside if "vocab_size" in ALL.get(choice, "") else []


def check_covers(cfg: dict[str, Any], verb: str) -> None:
    """Check that every leaf of a configuration fits its schema, or is in a list or group that has one."""
    assert list(problems(cfg, verb, read=())) == []
    known = key_schemas(cfg, verb)
    free = [key for key in flatten(cfg) if not any(key == name or key.startswith(f"{name}.") for name in known)]
    empty = [key for key in free if flatten(cfg)[key] not in ({}, None)]  # a group without a choice
    assert empty == []


@pytest.mark.parametrize("name", [*VERBS, *OTHERS])
def test_every_key_of_the_other_verbs_is_covered(name: str) -> None:
    cfg = config(*(["run=logs/latest", *VERBS[name]] if name in VERBS else OTHERS[name]), name=name)
    check_covers(cfg, name)


NEEDS_MORE = {
    "strategy=dp": "strategy=dp drives several GPUs from one process and none is visible",
    "strategy=model_split": r"strategy.devices=null \(every GPU\) is 0 of two",
    "strategy=horovod": "strategy=horovod (needs Horovod: build it with|is started by horovodrun)",
}


@functools.cache
def built(net: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.nn.Module, torch.Size]:
    """A net on the meta device, shapes without memory, by its configuration as JSON, and the shape of its logits."""
    with torch.device("meta"):
        made = instantiate(json.loads(net), "model.net")
        return made, made(torch.empty(shape, dtype=dtype)).shape


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param(choice, marks=pytest.mark.slow if choice.startswith("experiment=") else ())
        for choice in [*CHOICES, *NO_KEYS]
        if choice not in OWN
    ],
)
def test_every_choice_composes_and_can_be_built(request: pytest.FixtureRequest, choice: str) -> None:
    """Everything that needs neither data nor a device; each net once."""
    _group, name = choice.split("=")
    if name == "timm":
        request.getfixturevalue("timm")
    cfg = chosen(choice)
    if choice in CHOICES:
        check_covers(cfg, "train")
        assert check(cfg) == []
    data = cfg["data"]
    images = "channels" in data
    shape = (2, data["channels"], data["image_size"], data["image_size"]) if images else (2, data["length"])
    net, logits = built(json.dumps(cfg["model"]["net"]), shape, torch.float32 if images else torch.int64)
    assert logits == ((2, data["num_classes"]) if images else (*shape, data["vocab_size"]))
    optimizer = factory_of(instantiate(cfg["optimizer"], "optimizer"))(net)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    assert sum(len(part["params"]) for part in optimizer.param_groups) == len(trained)
    if cfg["scheduler"]:
        made = make_schedule(cfg["scheduler"])
        plan = plan_of(made)
        check_plan(made, ClassificationTask(net))
        peaks = [part["lr"] for part in optimizer.param_groups]
        scheduler = build_scheduler(plan.with_mode("min"), optimizer, 1000)
        assert all(0 <= lr <= peak for lr, peak in zip(scheduler.get_last_lr(), peaks, strict=True))
    module = instantiate(data, "data")
    facts = [key for key in ("num_classes", "vocab_size", "length", "batch_size", "max_tokens") if key in data]
    assert {key: getattr(module, key) for key in facts} == {key: data[key] for key in facts}
    assert len(facts) > 1
    for key, node in cfg["callbacks"].items():
        auto = {name: value for name, value in (("monitor", "val/loss"), ("mode", "min")) if node.get(name) == "auto"}
        instantiate({**node, **auto}, f"callbacks.{key}")
    check_compression(cfg)
    if cfg["compression"].get("distill", {}).get("teacher", "ema") is None:
        with pytest.raises(UserError, match=r"^compression\.distill\.teacher"):
            make_methods(cfg)
    else:
        assert len(make_methods(cfg)) == len(methods(cfg["compression"]))
    strategy = {
        key: value for key, value in cfg["strategy"].items() if key not in ("processes", "precisions", "compressions")
    }
    if choice in NEEDS_MORE and (choice == "strategy=horovod" or not torch.cuda.is_available()):
        with pytest.raises(UserError, match=NEEDS_MORE[choice]):
            instantiate(strategy, "strategy")
    else:
        instantiate(strategy, "strategy")
    trainer = instantiate({**cfg["trainer"], "_partial_": True}, "trainer")
    assert trainer.keywords["max_epochs"] == cfg["trainer"]["max_epochs"]


@pytest.mark.parametrize("choice", OWN)
def test_a_lightning_module_is_built(choice: str) -> None:
    cfg = chosen(choice)
    check_covers(cfg, "train")
    assert check(cfg) == []
    task = make_task(cfg)
    assert type(task.driven) is LitNet
    assert task.driven.hparams["lr"] == 0.1


def test_every_target_has_a_choice_whose_options_it_takes() -> None:
    assert set(TARGETS) <= {choice.partition("=")[2] for choice in ALL if choice.startswith("target=")}
    for name in set(TARGETS) & set(FORMATS):
        takes = inspect.signature(type(get(name))).parameters
        options = config(f"target={name}", "run=logs/latest", name="export")["target"][name]
        assert set(options) <= set(takes), name


# One step of a small run on one CPU that keeps nothing.
STEP = ["trainer.max_epochs=1", "trainer.max_steps=1", "trainer.limit_val_batches=1", "test=false"]
STEP += ["trainer.accelerator=cpu", "trainer.devices=1", "trainer.num_sanity_val_steps=0", "compression.receipt=none"]
STEPS = {"data", "task", "optimizer", "scheduler", "model", "trainer", "strategy", "precision", "compile"}
STEPS |= {"compression", "callbacks", "logger", "performance", "experiment", "debug"}  # the groups that a step shows
LISTED = {"callbacks": "callbacks=[default,{}]", "compression": "compression=[{}]", "logger": "logger=[{}]"}
MISSING = re.compile(r"a value has to be given|^paths\.data_dir=|^data\.folder=")


def with_others(choice: str) -> list[str]:
    """A choice of the user's with the experiment that names it, if there is one."""
    group, _, name = choice.partition("=")
    experiments = [one for one in YOURS if one.startswith("experiment=") and choice in named_by(ALL[one])]
    return experiments[:1] or [LISTED.get(group, f"{group}={{}}").format(name), *of_text(choice)]


@pytest.mark.filterwarnings("ignore")  # a first step warns of little: of its length, of your parts
@pytest.mark.parametrize("choice", [choice for choice in YOURS if choice.partition("=")[0] in STEPS])
def test_a_choice_of_your_own_makes_a_step(choice: str, tmp_path: Path) -> None:
    """For a certain net, data set or value, write a configs/experiment/<name>.yaml with all of them.

    Skipped while a value is missing or the data are not here.
    """
    try:
        run = lathe.train([*with_others(choice), *STEP, f"paths.log_dir={tmp_path}"])
    except (UserError, OSError) as error:
        causes = [error, error.__cause__, error.__context__]
        if MISSING.search(str(error)) or any(isinstance(cause, OSError) for cause in causes):
            pytest.skip(str(error))
        raise
    assert run.result["steps"] == 1


@pytest.mark.parametrize("choice", [choice for choice in YOURS if choice.startswith(("sweep=", "launch=", "target="))])
def test_a_choice_of_your_own_composes(choice: str) -> None:
    verb = ["run=logs/latest"] if choice.startswith("target=") else []
    config(choice, *verb, name="export" if verb else "train")
