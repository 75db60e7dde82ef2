"""Compress a finished run without training: quantization, or pruning in one step."""

import copy
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lathe import receipt
from lathe.callbacks import numbers
from lathe.compression import Compression, Prune, PruneChannels, quantization
from lathe.compression.callback import inputs_of
from lathe.compression.channels import prune_channels
from lathe.compression.modes import reestimate_batchnorm
from lathe.compression.pruning.masks import apply_masks, make_masks
from lathe.config.compression_plan import methods
from lathe.config.metric_names import directions
from lathe.config.resolve import set_data_folder
from lathe.config.validate import check_compression
from lathe.errors import require
from lathe.loggers.csv_logger import Discard
from lathe.runs import inference, rundir
from lathe.runs.checkpoints import read_checkpoint
from lathe.runs.rundir import RunDir, run_command
from lathe.tasks.core import is_foreign
from lathe.training import compression_finalize, final_evaluation
from lathe.training.trainer_setup import configure_logging, make_methods, make_trainer

Metrics = dict[str, float]
BATCHES = 15  # training batches for the new BatchNorm statistics
# methods that train, but can also act on a trained net in one step
ONE_SHOT = ("prune_channels", "prune", "prune_structured", "prune_nm")


def compress(cfg: dict[str, Any]) -> dict[str, Any]:
    """Apply the requested compression methods in order, write a new run, and return its result.

    The metrics of the new net are under `val/` and `test/`, those of the source under `source/val/` and `source/test/`.
    Raises UserError, before anything is written, for methods that have to train and for a run that is quantized
    already.
    """
    configure_logging()
    began = time.monotonic()
    request, source = cfg["request"], RunDir(cfg["paths"]["run_dir"])
    check_request(cfg)
    steps = make_methods({"compression": request["compression"]})
    task, config = inference.open_run_net(source.path, "run", request["checkpoint"], own=True)
    state = read_checkpoint(source.checkpoint(request["checkpoint"], "checkpoint"))
    names = ",".join(methods(request["compression"]))
    require(
        not quantization.describe(task.core),
        f"run={request['run']} is quantized already, compression={names} would act on rounded weights: name the run "
        "that it was made from.",
    )
    if request["batch_size"] is not None:
        config["data"]["eval_batch_size"] = request["batch_size"]
    set_data_folder(config, request["data"]["folder"])
    datamodule = inference.open_data(config, task)

    def metrics() -> Metrics:
        if is_foreign(task.driven):
            return own_metrics(task, config, datamodule, source.path)
        return {
            f"{split}/{name}": value
            for split in (("val", "test") if config["test"] else ("val",))
            for name, value in inference.score(task, task.net, datamodule.eval_loader(split)).items()
        }

    before, reports = metrics(), Metrics()
    for method in steps:
        reports |= apply_once(method, task.core, datamodule)
    after = metrics()
    unended = {**dict.fromkeys(("best_step", "steps"), int(state.get("global_step", 0))), "seed": config["seed"]}
    earlier = source.result if source.complete else unended
    monitor = str(earlier.get("monitor") or task.monitor)
    result: dict[str, Any] = {
        **{key: earlier[key] for key in ("best_step", "epochs", "steps", "seed") if key in earlier},
        **after,
        **{f"source/{name}": value for name, value in before.items()},
        **reports,
        "source": str(source.path),
        "monitor": monitor,
        "directions": {**directions(task, None, ""), **(earlier.get("directions") or {})},
        "objective": after.get(monitor),
        "parameters": sum(parameter.numel() for parameter in task.net.parameters()),
        "devices": 1,
        "name": request["name"] or config["name"],
        "seconds": time.monotonic() - began,
    }
    run = write_run(source, request, task.net, state)
    run.finish(result)
    rundir.point_latest(run.path.parent.parent, run.path)
    show(before, after, reports, run.path)
    if request["compression"]["receipt"] != "none":
        try:
            receipt.write(run, run.config, source.path, request["compression"]["receipt"])
        except BaseException:  # also a signal: the run itself is complete
            print(f"{run_command('scripts/receipt.py', 'run', run.path)} measures the receipt.", flush=True)
            raise
    final_evaluation.print_next(run, final_evaluation.proposals_after_compress(run, run.config))
    return result


def own_metrics(task: Any, config: dict[str, Any], datamodule: Any, folder: Path) -> Metrics:
    """Return what the steps of a LightningModule log, for validation and, with test=true, for testing."""
    options = {**config["trainer"], "inference_mode": False}  # a step may need gradients
    trainer = make_trainer({**config, "trainer": options}, folder, task.own_callbacks(), [Discard()])
    trainer.validate(task.driven, datamodule=datamodule, verbose=False)
    metrics = numbers(trainer.callback_metrics)
    if config["test"]:
        trainer.test(task.driven, datamodule=datamodule, verbose=False)
        metrics |= numbers(trainer.callback_metrics)
    task.driven.trainer = None
    return metrics


def check_request(cfg: dict[str, Any]) -> None:
    """Raise UserError for an invalid request, before weights or data are read."""
    request = cfg["request"]
    nodes, source = methods(request["compression"]), request["run"]
    require(bool(nodes), "compression=none leaves the run as it is: name a method, such as compression=ptq_static.")
    check_compression({"compression": request["compression"], "strategy": {}})
    for name, node in nodes.items():
        require(
            node["kind"] == "after" or name in ONE_SHOT,
            f"compression={name} has to train: use python train.py ckpt_path={source} compression={name}, with the "
            "model and data of that run.",
        )
    devices = cfg["trainer"]["devices"]
    require(devices in (1, "auto"), f"trainer.devices={devices}: a run is compressed in one process; leave it 1.")


def apply_once(method: Compression, net: Any, datamodule: Any) -> Metrics:
    """Apply a method to the trained net in one step, and return what it reports."""
    if isinstance(method, Prune):
        return prune_once(method, net, datamodule)
    if isinstance(method, PruneChannels):
        return remove_channels_once(method, net, datamodule)
    method.finalise(net, datamodule)
    return method.report()


def prune_once(method: Prune, net: Any, datamodule: Any) -> Metrics:
    """Mask the weights at the final sparsity in one step, and re-estimate the BatchNorm statistics."""
    require(
        method.criterion in ("magnitude", "random", "batchnorm"),
        f"{method.key}.criterion={method.criterion} watches training: choose magnitude, random or batchnorm here.",
    )
    method.parameters = dict(method.chosen_or_raise(net))
    weights = list(method.parameters.values())
    apply_masks(net, make_masks(method.scores(net, 0), method.sparsity, **vars(method.pattern)))
    reestimate_batchnorm(net, inputs_of(datamodule, BATCHES))
    zeros = sum(int((weight == 0).sum()) for weight in weights)
    return {
        f"{method.name}/sparsity": zeros / sum(weight.numel() for weight in weights),
        f"{method.name}/sparsity_net": zeros / sum(parameter.numel() for parameter in net.parameters()),
    }


def remove_channels_once(method: PruneChannels, net: Any, datamodule: Any) -> Metrics:
    """Remove channels down to the budget in one step, and re-estimate the BatchNorm statistics."""
    require(
        method.options.importance != "taylor",
        "compression.prune_channels.importance=taylor needs gradients: choose another here, or prune in train.py.",
    )
    example = inputs_of(datamodule, 1)[0][: method.latency_batch]
    shares = prune_channels(net, example, seed=getattr(datamodule, "seed", 0), **vars(method.options))
    reestimate_batchnorm(net, inputs_of(datamodule, BATCHES))
    return {f"prune_channels/{name}_share": share for name, share in shares.items()}


def write_run(source: RunDir, request: dict[str, Any], net: Any, state: dict[str, Any]) -> RunDir:
    """Create a run next to `source`: its configuration with the new `compression`, and best.ckpt."""
    config = copy.deepcopy(source.config)
    set_data_folder(config, request["data"]["folder"])
    config |= {
        "compression": request["compression"],
        "ckpt_path": str(source.path),
        "ckpt_mode": "weights",
        "resume": None,
        "name": request["name"] or config["name"],
    }
    names = list(methods(request["compression"]))
    overrides = [f"run={source.path}", f"checkpoint={request['checkpoint']}", f"compression=[{','.join(names)}]"]
    overrides += [f"name={request['name']}"] if request["name"] else []
    above = source.path.parent  # below the log directory, unless the run was copied out of one
    home = above.parent if above.name == source.config["name"] else above
    run = rundir.create(home, config, overrides)
    try:
        compression_finalize.write_weights(run.best, net, state)
    except OSError:
        run.remove()
        raise
    return run


def show(before: Metrics, after: Metrics, reports: Metrics, run: Path) -> None:
    table = Table(title="Compressed", title_justify="left")
    for column in ("metric", "before", "after", "change"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for name in sorted(after):
        table.add_row(name, f"{before[name]:.4f}", f"{after[name]:.4f}", f"{after[name] - before[name]:+.4f}")
    for name in sorted(reports):
        table.add_row(name, "", f"{reports[name]:.4g}", "")
    Console().print(table)
    print(f"run directory: {run}")
