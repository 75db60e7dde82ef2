"""suite=int8: size, latency and metric of a trained net as a float32 and as an integer file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lathe import export
from lathe.errors import require
from lathe.files import scratch
from lathe.launch.api import compose, train
from lathe.measure import interleaved, plot
from lathe.runs.rundir import RunDir, open_run
from lathe.verbs.export import compared, make, ready_for, targets_of
from suites.inference import Bundled, inputs_of
from suites.results import MIB, Columns, Facts, Results, Spread, Threshold, fact, show
from suites.runner import report

FLOAT, INTEGER, TRAINED = "float32", "int8", "int8, qat"
TARGETS = {FLOAT: "onnx", INTEGER: "onnx_int8", TRAINED: "onnx_int8"}
# Overrides of scripts/export.py. Any loss is a result here, measured on all held-out data.
EXPORT = ("run=trained", "target=[onnx,onnx_int8]", "target.samples=null", "target.max_drop=null")
# Trains in seconds on a CPU; on a GPU, the net of the published figures.
SMALL = ("model=resnet18", "data=digits", "data.image_size=16", "trainer.accelerator=cpu", "trainer.max_epochs=3")
PUBLISHED = ("experiment=cifar10_resnet50_amp",)
QUIET = ("trainer.enable_progress_bar=false", "trainer.enable_model_summary=false")
# Published for ResNet-50: a quarter of the size (plus scales, biases and the graph), a third of the latency, half a
# point of accuracy.
SIZE, LATENCY, POINTS = 0.26, 0.33, 0.5


def measure(request: Mapping[str, Any], output: Path) -> tuple[Facts, Results]:
    """Measure the latency of each form and batch size in each round, with the file's bytes and metric.

    `request["export"]` is the resolved `target` group of scripts/export.py with EXPORT.
    """
    for name in dict.fromkeys(TARGETS.values()):
        missing = export.get(name).available()
        require(missing is None, str(missing))
    runs = _runs(request, output)
    results, facts = Results(), dict[str, dict[str, Any]]()
    with torch.no_grad(), scratch() as folder:
        forms = {
            name: _export(name, run, folder / str(number), request["export"])
            for number, (name, run) in enumerate(runs.items())
        }
        inputs = inputs_of(ready_for(TARGETS[FLOAT], {}, runs[FLOAT].path))
        calls = {}
        for batch in sorted(set(request["batches"])):
            x = inputs[torch.arange(batch) % len(inputs)].clone()
            calls[batch] = {name: form.open(x, request["threads"]).call for name, (form, _) in forms.items()}
        for number in range(request["rounds"]):
            for batch in calls:
                times = interleaved(calls[batch], request["steps"], request["warmup"])
                for name, (_, about) in forms.items():
                    side = f"{name}, batch {batch}"
                    facts[side] = {"form": name, "batch": batch, **about}
                    figures = {"latency_ms": times[name].median * 1e3, "bytes": about["bytes"]}
                    results.setdefault(side, []).append({**figures, about["metric"]: about["value"]})
            report(f"round {number + 1} of {request['rounds']}")
    return facts, results


def _runs(request: Mapping[str, Any], output: Path) -> dict[str, RunDir]:
    """Return the run of each form: the request's, or those trained below `output`."""
    if request["run"] is not None:
        run = open_run(request["run"], "run")
        return {FLOAT: run, INTEGER: run}
    own = [str(text) for text in request["overrides"]]
    recipe = PUBLISHED if request["accelerator"] == "gpu" else SMALL
    overrides = [*(() if any(text.startswith("experiment=") for text in own) else recipe), *QUIET, *own]
    report("training")

    def trained(overrides: Sequence[str], of: RunDir | None = None) -> RunDir:
        cfg = compose(overrides)
        cfg.paths.log_dir = str(output / "runs")
        cfg.ckpt_path = None if of is None else str(of.path)  # starts from its weights
        return RunDir(train(cfg).dir)

    run = trained(overrides)
    if request["qat"] is None:
        return {FLOAT: run, INTEGER: run}
    rate = run.config["optimizer"]["lr"] / 10  # trained weights move little
    further = ("compression=qat", "compression.receipt=none", f"trainer.max_epochs={request['qat']}")
    report("training with integers simulated")
    taught = trained([*overrides, *further, f"optimizer.lr={rate}"], run)
    return {FLOAT: run, INTEGER: run, TRAINED: taught}


def _export(name: str, run: RunDir, folder: Path, shared: Mapping[str, Any]) -> tuple[Bundled, dict[str, Any]]:
    """Export a run for form `name`, compare the file with the net on held-out data, and return its facts."""
    target = TARGETS[name]
    options = targets_of(shared)[target]
    folder.mkdir()
    ready = ready_for(target, options, run.path)
    facts = make(ready, target, options, folder)
    parity = compared(run.path, ready, folder, target, options, shared)
    require(parity["figures"] is not None, f"run={run.path}: its held-out data can't be opened, so no metric is known.")
    form = Bundled(folder, "made", parity["arithmetic"])
    value = parity["figures"]["file"][parity["metric"]]
    report(f"{name}: {form.bytes / MIB:.2f} MiB, {parity['metric']} {value:.4f}")
    return form, {
        "run": run.path.name,
        "net": facts["net"],
        "ranges": "calibrated" if facts["calibrated"] else "trained" if facts["integers"] else "",
        "bytes": form.bytes,
        "metric": parity["metric"],
        "value": value,
        "samples": parity["samples"],
    }


def tables(facts: Facts, results: Results, request: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return a row for each form and batch size."""
    first = next(iter(facts.values()))
    metric = first["metric"]

    def base(name: str) -> str:
        return f"{FLOAT}, batch {facts[name]['batch']}"

    columns: Columns = {
        "form": fact(facts, "form"),
        "ranges": fact(facts, "ranges"),
        "batch": fact(facts, "batch"),
        "MiB": lambda name: f"{facts[name]['bytes'] / MIB:.2f}",
        "size over float32's": lambda name: f"{facts[name]['bytes'] / facts[base(name)]['bytes']:.3f}",
        "latency, ms": results.cells("latency_ms", ".2f"),
        "latency over float32's": lambda name: show(results.ratio(name, base(name), "latency_ms")),
        metric: lambda name: f"{results[name][0][metric]:.4f}",
        "minus float32's": lambda name: f"{results[name][0][metric] - results[base(name)][0][metric]:+.4f}",
    }
    note = (
        f"Run {first['run']}: {first['net']}; {metric} of the files themselves on {first['samples']} held-out samples. "
        f"ONNX Runtime on the CPU, uint8 pixels in; a round's latency is the median of {request['steps']} calls, of "
        "all forms in turns.\n"
    )
    if any(about["form"] == INTEGER and about["ranges"] == "trained" for about in facts.values()):
        note += "The run was trained with integers simulated: its float32 is the rounded weights as floats.\n"
    latency = {name: results.spread(name, "latency_ms") for name in facts}
    heights = {n: {"latency, ms": spread.median / facts[n]["batch"]} for n, spread in latency.items() if spread}
    return [results.table(columns), note], plot.stacks("Latency of a sample", "ms", heights)


def claims(results: Results) -> list[Threshold]:
    """Return the published figures of integers relative to float32."""
    limits = list[Threshold]()
    for side, rounds in results.items():
        form, _, batch = side.rpartition(", ")
        base = f"{FLOAT}, {batch}"
        if form == FLOAT:
            continue
        if not any(limit.sentence.startswith(f"{form}: ") for limit in limits):
            size = results.ratio(side, base, "bytes")
            limits.append(Threshold(f"{form}: size over float32's,", size, at_most=SIZE))
            if "accuracy" in rounds[0]:
                lost = 100 * (results[base][0]["accuracy"] - rounds[0]["accuracy"])
                limits.append(Threshold(f"{form}: points of accuracy lost,", Spread([lost]), at_most=POINTS))
        latency = results.ratio(side, base, "latency_ms")
        limits.append(Threshold(f"{form}: latency at {batch} over float32's,", latency, at_most=LATENCY))
    return limits
