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

from lathe.compression.pruning.sensitivity import (
    KINDS,
    Allocation,
    Found,
    Option,
    allocate,
    changed,
    layers,
    monotone,
    quantized_bytes,
    scan,
    sparse_bytes,
)
from lathe.compression.quantization.layers import quantized_class
from lathe.compression.structure import structure_of
from lathe.data.transfer import train_batches
from lathe.errors import UserError, did_you_mean, require
from lathe.files import write_atomically
from lathe.measure.plot import lines
from lathe.runs import inference
from lathe.runs.rundir import RunDir
from lathe.tasks import Task


def sensitivity(cfg: dict[str, Any]) -> dict[str, Any]:
    """Measure the requested changes, print the table, and return the contents of sensitivity.json.

    Writes sensitivity.json, plots and, with a budget for bits, override.txt below `sensitivity/` in the run directory.
    """
    request, run = cfg["request"], RunDir(cfg["paths"]["run_dir"])
    check_request(request)
    times = _read_latency(request)
    task, _ = inference.open_run_net(run.path, "run", request["checkpoint"])
    require(
        "quantization" not in structure_of(task.net),
        f"run={request['run']} is quantized already, which leaves nothing to choose: take the run that it came from.",
    )
    metrics = task.reported
    metric = request["metric"]
    require(metric in metrics, f"metric={metric}: the task reports no such metric; {did_you_mean(metric, metrics)}")
    chosen = layers(task.net, request["layers"])
    bench = _Bench(task, cfg, request)
    baseline = bench.score()
    with changed(task.net, {}, bench.inputs):  # with no layer changed: the reference of all changes
        reference = bench.score()
    with Progress(transient=True, disable=not cfg["trainer"]["enable_progress_bar"]) as bar:
        tried = len(request["sparsities"]) + len(request["bits"])
        row = bar.add_task("layers", total=len(chosen) * tried)
        found = scan(
            task.net,
            chosen,
            sparsities=sorted(request["sparsities"]),
            bits=sorted(request["bits"], reverse=True),
            score=bench.score,
            batches=bench.inputs,
            done=lambda: bar.advance(row),
        )
    shapes = {name: tuple(module.get_parameter("weight").shape) for name, module in chosen.items()}
    report: dict[str, Any] = {
        "checkpoint": request["checkpoint"],
        "split": "val",
        "metric": metric,
        "reestimated_batches": len(bench.inputs),
        "baseline": baseline,
        "reference": reference,
        "layers": {name: {"shape": list(shapes[name]), **found[name]} for name in found},
    }
    if request["budget"] is not None:
        report["allocation"] = _choose(bench, request, report, found, shapes, times)
    folder = run.path / "sensitivity"
    folder.mkdir(exist_ok=True)
    write_atomically(folder / "sensitivity.json", json.dumps(report, indent=2) + "\n")
    for kind in KINDS:
        if request["sparsities" if kind == "sparsity" else "bits"]:
            series = {
                name: sorted((value, some[metric]) for value, some in found[name][kind].items()) for name in found
            }
            title = f"validation {metric} with one layer changed ({reference[metric]:.4g} unchanged)"
            write_atomically(folder / f"{kind}.svg", lines(title, kind, metric, series))
    _show(report, folder)
    if "allocation" in report and report["allocation"]["override"] is not None:
        write_atomically(folder / "override.txt", report["allocation"]["override"] + "\n")
    return report


def check_request(request: dict[str, Any]) -> None:
    """Raise UserError for a request that tries nothing, or a budget without values to choose from."""
    devices, kind, budget = request["trainer"]["devices"], request["allocate"], request["budget"]
    require(
        bool(request["sparsities"] or request["bits"]),
        "sparsities=[] and bits=[] try nothing: give values for one of them.",
    )
    require(devices == 1, f"trainer.devices={devices}: one device measures; leave it at 1.")
    tried = request["bits" if kind == "bits" else "sparsities"]
    require(
        budget is None or bool(tried), f"budget={budget} with allocate={kind} needs values to choose from: give some."
    )


def _read_latency(request: dict[str, Any]) -> dict[str, dict[str, float]] | None:
    path = request["latency"]
    if path is None:
        return None
    require(
        request["budget"] is not None,
        f"latency={path} serves a choice under a budget: give budget in the unit of its times.",
    )
    try:
        table = json.loads(Path(path).read_text())
        return {
            str(name): {f"{float(value):g}": float(time) for value, time in row.items()} for name, row in table.items()
        }
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError(
            f"latency={path} can't be read as JSON of the form {{layer: {{value: seconds}}}}: {error}"
        ) from error


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


def _choose(
    bench: _Bench,
    request: dict[str, Any],
    report: dict[str, Any],
    found: Found,
    shapes: dict[str, tuple[int, ...]],
    times: dict[str, dict[str, float]] | None,
) -> dict[str, Any]:
    """Choose a value per layer; measure the net with these, and with one value for all layers."""
    kind, metric = request["allocate"], report["metric"]
    dense = sum(quantized_bytes(shape, 32) for shape in shapes.values())
    budget, said = float(request["budget"]), f"budget={request['budget']}"
    if times is None and budget <= 1:
        budget *= dense
        said += f" ({budget:.0f} bytes)"
    sign = 1.0 if metric in bench.task.minimised else -1.0
    options: dict[str, list[Option]] = {}
    for name, some in found.items():
        losses = monotone(
            {value: sign * (metrics[metric] - report["reference"][metric]) for value, metrics in some[kind].items()}
        )
        options[name] = [
            Option(value, _cost(name, kind, value, shapes[name], times), loss) for value, loss in losses.items()
        ]
        if kind == "sparsity":
            options[name].append(Option(0.0, _cost(name, kind, 0.0, shapes[name], times), 0.0))
    best = allocate(options, budget, said)
    return {
        "kind": kind,
        "budget": budget,
        "cost": best.cost,
        "dense_bytes": dense,
        "values": best.values,
        "expected_loss": best.loss,
        "measured": _measure(bench, kind, best.values),
        "uniform": _uniform(bench, kind, options, budget),
        "override": _override(kind, best, bench.net),
    }


def _cost(
    name: str, kind: str, value: float, shape: tuple[int, ...], times: dict[str, dict[str, float]] | None
) -> float:
    if times is None:
        return quantized_bytes(shape, int(value)) if kind == "bits" else sparse_bytes(shape, value)
    try:
        return times[name][f"{value:g}"]
    except KeyError as error:
        raise UserError(
            f"latency has no time for {name} at {kind} {value:g}: add it, or narrow what is tried."
        ) from error


def _measure(bench: _Bench, kind: str, values: dict[str, float]) -> dict[str, float]:
    with changed(bench.net, {name: (kind, value) for name, value in values.items()}, bench.inputs):
        return bench.score()


def _uniform(bench: _Bench, kind: str, options: dict[str, list[Option]], budget: float) -> dict[str, Any] | None:
    """Return the mildest common value within the budget, with its metrics; None if none fits."""
    costs: dict[float, float] = {}
    for some in options.values():
        for option in some:
            costs[option.value] = costs.get(option.value, 0.0) + option.cost
    fitting = {value: cost for value, cost in costs.items() if cost <= budget}
    if not fitting:
        return None
    value = max(fitting, key=lambda value: fitting[value])
    return {"value": value, "cost": fitting[value], "measured": _measure(bench, kind, dict.fromkeys(options, value))}


def _override(kind: str, best: Allocation, net: nn.Module) -> str | None:
    """Return the overrides that train with the chosen bits; None without any.

    Layers that share a chosen weight, such as a tied head, are included. Quotes protect the braces from the shell.
    """
    if kind != "bits":
        return None
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
    for kind in KINDS:
        rows = {name: layer[kind] for name, layer in report["layers"].items() if layer[kind]}
        if not rows:
            continue
        values = list(next(iter(rows.values())))
        table = Table(
            "layer",
            "weights",
            *(f"{value:g}" for value in values),
            title_justify="left",
            title=f"validation {metric} by {kind} of one layer; unchanged {base:.4g}",
        )
        for name, row in rows.items():
            count = torch.Size(report["layers"][name]["shape"]).numel()
            table.add_row(name, str(count), *(f"{row[value][metric]:.4g}" for value in values))
        console.print(table)
    if "allocation" in report:
        choice = report["allocation"]
        console.print(
            f"chosen under {choice['budget']:.6g}: cost {choice['cost']:.6g}, {metric} "
            f"{choice['measured'][metric]:.4g} with all layers changed at once, {base:.4g} unchanged",
            highlight=False,
        )
        if choice["uniform"] is not None:
            same = choice["uniform"]
            console.print(
                f"{choice['kind']} {same['value']:g} for every layer: cost {same['cost']:.6g}, {metric} "
                f"{same['measured'][metric]:.4g}",
                highlight=False,
            )
        table = Table("layer", choice["kind"], title="chosen", title_justify="left")
        for name, value in choice["values"].items():
            table.add_row(name, f"{value:g}")
        console.print(table)
        if choice["override"] is not None:
            console.print(choice["override"], soft_wrap=True, highlight=False)
    console.print(f"written to {folder}", soft_wrap=True, highlight=False)
