"""What people type by habit, from other templates and from plain Lightning, and what is typed here."""

import re

# Keys of other templates, with what is typed here.
HABITS = {
    "hparams_search": "a search is a sweep: python train.py -m optimizer.lr=0.03,0.1, or sweep=optuna with sweep.space",
    "train": "train=false tests the weights of ckpt_path=... without training; a finished run is evaluated by "
    "python scripts/evaluate.py run=logs/latest",
    "task_name": "the label of a run is name=...",
    "experiment_name": "the label of a run is name=...",
    "datamodule": "data sets are chosen by data=...",
    "dataset": "data sets are chosen by data=...",
    "net": "nets are chosen by model=...",
    "gpus": "devices are trainer.accelerator=gpu trainer.devices=...",
    "devices": "devices are trainer.devices=...",
    "epochs": "the length of a run is trainer.max_epochs=...",
    "ckpt": "a new run starts from ckpt_path=..., an interrupted one goes on with resume=...",
    "checkpoint": "a new run starts from ckpt_path=..., an interrupted one goes on with resume=...",
    "trainer.gpus": "devices are trainer.accelerator=gpu trainer.devices=...",
    "extras": "leave it out: warnings and tables have keys of their own, which python train.py --help lists",
    "seed_everything": "all that is drawn follows seed=1, say",
    "model.loss": "the loss of a run is task.loss=...",
}
# Lightning's command line has a word for what to do before the keys.
VERBS = {
    "fit": "leave it out: python train.py trains",
    "validate": "a finished run is evaluated by python scripts/evaluate.py run=logs/latest split=val",
    "test": "a finished run is evaluated by python scripts/evaluate.py run=logs/latest split=test",
    "predict": "a finished run predicts by python scripts/predict.py run=logs/latest input=<images> output=<file>",
}


def strategy_of(name: str) -> str:
    """What is typed for one of Lightning's names of strategies; empty where none is known, or it is the same."""
    if re.fullmatch(r"ddp_(spawn|fork|notebook)?_?find_unused_parameters_true", name):
        return "strategy=ddp strategy.find_unused_parameters=true"
    if re.fullmatch(r"ddp_(spawn|fork|notebook|find_unused_parameters_false)(_find_unused_parameters_false)?", name):
        return "strategy=ddp"
    if stage := re.fullmatch(r"deepspeed_stage_([123](_offload)?)", name):
        return f"strategy=deepspeed_{stage[1]}"
    return {"deepspeed": "strategy=deepspeed_2", "single_device": "strategy=auto"}.get(name, "")
