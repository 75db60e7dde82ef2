"""What people type by habit, from other templates and from plain Lightning, and what is typed here."""

import re

# Keys of other templates, with what is typed here.
HABITS = {
    "hparams_search": "a search is a sweep: python train.py -m optimizer.lr=0.03,0.1, or sweep=optuna with sweep.space",
    "train": "train=false tests the weights of ckpt_path=... without training; a finished run is evaluated by "
    "python scripts/evaluate.py run=logs/latest",
    "task_name": "the label of a run is name=...",
    "experiment_name": "the label of a run is name=...",
    "run_name": "the label of a run is name=...",
    "datamodule": "data sets are chosen by data=...",
    "dataset": "data sets are chosen by data=...",
    "module": "nets are chosen by model=..., what is learned by task=...",
    "net": "nets are chosen by model=...",
    "auto_lr_find": "a learning rate is looked for by python scripts/lr_find.py",
    "auto_scale_batch_size": "a batch size is looked for by python scripts/batch_find.py",
    "gpus": "devices are trainer.accelerator=gpu trainer.devices=...",
    "devices": "devices are trainer.devices=...",
    "epochs": "the length of a run is trainer.max_epochs=...",
    "ckpt": "a new run starts from ckpt_path=..., an interrupted one goes on with resume=...",
    "checkpoint": "a new run starts from ckpt_path=..., an interrupted one goes on with resume=...",
    "output_dir": "runs are written below paths.log_dir=...",
    "trainer.auto_lr_find": "a learning rate is looked for by python scripts/lr_find.py",
    "trainer.auto_scale_batch_size": "a batch size is looked for by python scripts/batch_find.py",
    "trainer.gpus": "devices are trainer.accelerator=gpu trainer.devices=...",
    "trainer.resume_from_checkpoint": "an interrupted run goes on with resume=..., a new one starts from ckpt_path=...",
    "extras": "leave it out: warnings and tables have keys of their own, which python train.py --help lists",
    "seed_everything": "all that is drawn follows seed=1, say",
    "compile_model": "compilation is compile=default",
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
