"""Keys, choices and flags that users of other templates type first, and the ones of Lathe."""

import re

KEYS = {
    "hparams_search": "a search is a sweep: python train.py -m optimizer.lr=0.03,0.1, or sweep=optuna with sweep.space",
    "train": "train=false tests the weights of ckpt_path=... without training; a finished run is evaluated by "
    "python scripts/evaluate.py run=logs/latest",
    "task_name": "the label of a run is name=...",
    "datamodule": "data sets are chosen by data=...",
    "net": "nets are chosen by model=...",
    "gpus": "devices are trainer.accelerator=gpu trainer.devices=...",
    "trainer.gpus": "devices are trainer.accelerator=gpu trainer.devices=...",
    "epochs": "the length of a run is trainer.max_epochs=...",
    "ckpt": "a new run starts from ckpt_path=..., an interrupted one continues with resume=...",
    "extras": "leave it out: python train.py --help lists the keys of warnings and tables",
}
FLAGS = {
    "lr": "optimizer.lr",
    "batch_size": "data.batch_size",
    "epochs": "trainer.max_epochs",
    "max_epochs": "trainer.max_epochs",
    "devices": "trainer.devices",
    "gpus": "trainer.devices",
}
# Subcommands of Lightning's command line.
SUBCOMMANDS = {
    "fit": "leave it out: python train.py trains",
    "validate": "a finished run is evaluated by python scripts/evaluate.py run=logs/latest split=val",
    "test": "a finished run is evaluated by python scripts/evaluate.py run=logs/latest split=test",
    "predict": "a finished run predicts by python scripts/predict.py run=logs/latest input=<images> output=<file>",
}
# Choices whose most similar name is not what is meant.
CHOICES = {
    "resnet": "resnet20",
    "16": "16-mixed",
    "fp16": "16-mixed",
    "bf16": "bf16-mixed",
    "32": "32-true",
}


def strategy_override(name: str) -> str:
    """Return the override for one of Lightning's names of strategies; empty where it is the same, or unknown."""
    if re.fullmatch(r"ddp_(spawn|fork|notebook)?_?find_unused_parameters_true", name):
        return "strategy=ddp strategy.find_unused_parameters=true"
    if re.fullmatch(r"ddp_(spawn|fork|notebook|find_unused_parameters_false)(_find_unused_parameters_false)?", name):
        return "strategy=ddp"
    if stage := re.fullmatch(r"deepspeed_stage_([123](_offload)?)", name):
        return f"strategy=deepspeed_{stage[1]}"
    return {"deepspeed": "strategy=deepspeed_2", "single_device": "strategy=auto"}.get(name, "")
