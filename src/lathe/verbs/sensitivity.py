"""Measure how sensitive a run's layers are to sparsity and bits, and choose values under a budget."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

from lathe.compression.pruning import sensitivity as search
from lathe.compression.quantization.net import quantized_class
from lathe.compression.structure import structure_of
from lathe.data.transfer import train_batches
from lathe.errors import UserError, did_you_mean, require
from lathe.files import write_atomically
from lathe.measure.plot import lines
from lathe.runs import inference
from lathe.runs.rundir import RunDir
from lathe.tasks import Task


def sensitivity(cfg: dict[str, Any]) -> dict[str, Any]:
    """Measure the changes, print the table, write sensitivity/ in the run, and return sensitivity.json."""
    request, run = cfg["request"], RunDir(cfg["paths"]["run_dir"])
    devices, budget, latency = request["trainer"]["devices"], request["budget"], request["latency"]
    tried = {"sparsity": sorted(request["sparsities"]), "bits": sorted(request["bits"], reverse=True)}
    require(any(tried.values()), "sparsities=[] and bits=[] try nothing: give values for one of them.")
    require(devices == 1, f"trainer.devices={devices}: one device measures; leave it at 1.")
    kind = request["allocate"]
    require(budget is None or bool(tried[kind]), f"budget={budget} with allocate={kind} needs values to choose from.")
    require(latency is None or budget is not None, f"latency={latency} needs a budget in the unit of its times.")
    times = None if latency is None else _read_times(latency)
    task, _ = inference.open_run_net(run.path, "run", request["checkpoint"])
    require(
        "quantization" not in structure_of(task.net),
        f"run={request['run']} is quantized already: take the run that it came from.",
    )
    metrics = task.reported
    metric = request["metric"]
    require(metric in metrics, f"metric={metric}: the task reports no such metric; {did_you_mean(metric, metrics)}")
    chosen = search.layers(task.net, request["layers"])
    bench = _Bench(task, cfg, request)
    baseline, reference = bench.score(), bench.score_changed("", {})
    with Progress(transient=True, disable=not cfg["trainer"]["enable_progress_bar"]) as bar:
        row = bar.add_task("layers", total=len(chosen) * sum(map(len, tried.values())))
        changes = search.scan(
            task.net,
            chosen,
            sparsities=tried["sparsity"],
            bits=tried["bits"],
            score=bench.score,
            batches=bench.inputs,
            done=lambda: bar.advance(row),
        )
    shapes = {name: list(module.get_parameter("weight").shape) for name, module in chosen.items()}
    report: dict[str, Any] = {
        "checkpoint": request["checkpoint"],
        "split": "val",
        "metric": metric,
        "reestimated_batches": len(bench.inputs),
        "baseline": baseline,
        "reference": reference,
        "layers": {name: {"shape": shapes[name], **changes[name]} for name in changes},
    }
    if budget is not None:
        report["allocation"] = _choose(bench, request, report, times)
    folder = run.path / "sensitivity"
    folder.mkdir(exist_ok=True)
    write_atomically(folder / "sensitivity.json", json.dumps(report, indent=2) + "\n")
    for kind, values in tried.items():
        if values:
            series = {
                name: sorted((x, scores[metric]) for x, scores in changes[name][kind].items()) for name in changes
            }
            title = f"validation {metric} with one layer changed ({reference[metric]:.4g} unchanged)"
            write_atomically(folder / f"{kind}.svg", lines(title, kind, metric, series))
    _show(report, folder)
    if "allocation" in report and report["allocation"]["override"] is not None:
        write_atomically(folder / "override.txt", report["allocation"]["override"] + "\n")
    return report


def _read_times(path: str) -> dict[str, dict[str, float]]:
    """Return the seconds of each layer by name and value."""
    try:
        table = json.loads(Path(path).read_text())
        return {name: {f"{float(key):g}": float(time) for key, time in row.items()} for name, row in table.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        form = "JSON of the form {layer: {value: seconds}}"
        raise UserError(f"latency={path} can't be read as {form}: {error}") from error


class _Bench:
    """The net, validation batches and training inputs, on one device."""

    def __init__(self, task: Task, cfg: dict[str, Any], request: dict[str, Any]) -> None:
        wanted = request["trainer"]["accelerator"]
        self.device = torch.device("cuda" if wanted in ("auto", "gpu") and torch.cuda.is_available() else "cpu")
        self.task, self.net = task, task.net.to(self.device)
        data = inference.open_data(cfg, task)
        self.batches = list(islice(data.eval_loader("val"), request["limit_batches"]))
        normed = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.net.modules())
        count = request["reestimate"] if normed else 0
        self.inputs = [batch[0] for batch in islice(train_batches(data, self.device), count)] if count else []

    def score(self) -> dict[str, float]:
        return inference.score(self.task, lambda x: self.net(x.to(self.device)).cpu(), self.batches)

    def score_changed(self, kind: str, values: dict[str, float]) -> dict[str, float]:
        """Return the metrics with these layers changed, and batch statistics estimated again."""
        with search.changed(self.net, {name: (kind, value) for name, value in values.items()}, self.inputs):
            return self.score()


def _choose(
    bench: _Bench, request: dict[str, Any], report: dict[str, Any], times: dict[str, dict[str, float]] | None
) -> dict[str, Any]:
    """Choose a value per layer under the budget (by `times`, or bytes); measure it, and one value for all layers."""
    kind, metric, reference = request["allocate"], report["metric"], report["reference"]
    dense = sum(search.quantized_bytes(layer["shape"], 32) for layer in report["layers"].values())
    budget, label = float(request["budget"]), f"budget={request['budget']}"
    if times is None and budget <= 1:
        budget *= dense
        label += f" ({budget:.0f} bytes)"

    def cost(name: str, value: float) -> float:
        shape = report["layers"][name]["shape"]
        if times is None:
            return search.quantized_bytes(shape, int(value)) if kind == "bits" else search.sparse_bytes(shape, value)
        time = times.get(name, {}).get(f"{value:g}")
        if time is None:
            raise UserError(f"latency has no time for {name} at {kind} {value:g}: add it, or narrow what is tried.")
        return time

    sign = 1.0 if metric in bench.task.minimised else -1.0
    options: dict[str, list[search.Option]] = {}
    for name, layer in report["layers"].items():
        losses = search.monotone(
            {value: sign * (row[metric] - reference[metric]) for value, row in layer[kind].items()}
        )
        losses |= {0.0: 0.0} if kind == "sparsity" else {}
        options[name] = [search.Option(value, cost(name, value), loss) for value, loss in losses.items()]
    best = search.allocate(options, budget, label)
    tried = [option.value for option in next(iter(options.values()))]
    common = {value: sum(cost(name, value) for name in options) for value in tried}
    fitting = {value: total for value, total in common.items() if total <= budget}
    uniform = None
    if fitting:
        value = max(fitting, key=lambda value: fitting[value])  # the mildest
        measured = bench.score_changed(kind, dict.fromkeys(options, value))
        uniform = {"value": value, "cost": fitting[value], "measured": measured}
    return {
        "kind": kind,
        "budget": budget,
        "cost": best.cost,
        "dense_bytes": dense,
        "values": best.values,
        "expected_loss": best.loss,
        "measured": bench.score_changed(kind, best.values),
        "uniform": uniform,
        "override": _override(best, bench.net) if kind == "bits" else None,
    }


def _override(best: search.Allocation, net: nn.Module) -> str | None:
    """Return the overrides that train with the bits, also of layers that share a weight (a tied head), or None."""
    bits = {id(net.get_submodule(name).get_parameter("weight")): value for name, value in best.values.items()}
    weights = {
        name: id(getattr(m, "weight", None)) for name, m in net.named_modules() if quantized_class(m) is not None
    }
    pairs = ",".join(f"{name}:{bits[weight]:g}" for name, weight in weights.items() if weight in bits)
    if not pairs:  # such as 1-d convolutions, which no method quantizes
        return None
    steps = " compression.qat.lsq=true" if min(best.values.values()) < 5 else ""
    return f"compression=qat 'compression.qat.layer_bits={{{pairs}}}'{steps}"


def _show(report: dict[str, Any], folder: Path) -> None:
    console, metric, base = Console(), report["metric"], report["reference"][report["metric"]]
    for kind in search.KINDS:
        layers = {name: layer for name, layer in report["layers"].items() if layer[kind]}
        if layers:
            values = list(next(iter(layers.values()))[kind])
            title = f"validation {metric} by {kind} of one layer; unchanged {base:.4g}"
            table = Table("layer", "weights", *map("{:g}".format, values), title_justify="left", title=title)
            for name, layer in layers.items():
                cells = [f"{layer[kind][value][metric]:.4g}" for value in values]
                table.add_row(name, str(torch.Size(layer["shape"]).numel()), *cells)
            console.print(table)
    choice = report.get("allocation")
    if choice is not None:
        kind, same, measured = choice["kind"], choice["uniform"], choice["measured"]
        print(
            f"chosen under {choice['budget']:.6g}: cost {choice['cost']:.6g}, {metric} {measured[metric]:.4g} with all "
            f"layers changed at once, {base:.4g} unchanged"
        )
        if same is not None:
            reached = f"{metric} {same['measured'][metric]:.4g}"
            print(f"{kind} {same['value']:g} for every layer: cost {same['cost']:.6g}, {reached}")
        table = Table("layer", kind, title="chosen", title_justify="left")
        for name, value in choice["values"].items():
            table.add_row(name, f"{value:g}")
        console.print(table)
        if choice["override"] is not None:
            print(choice["override"])
    print(f"written to {folder}")
