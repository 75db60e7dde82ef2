"""The suite `int8`: size, latency and metric of a trained net as a float32 and as an integer file."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lathe import export
from lathe.benchmark.forms import Bundled
from lathe.benchmark.spread import Results, Spread, spread, table
from lathe.benchmark.turns import Claim, Facts, over
from lathe.errors import require
from lathe.files import scratch
from lathe.launch.api import compose, train
from lathe.measure import interleaved, plot
from lathe.runs.rundir import RunDir, open_run
from lathe.verbs.export import make, ready_for, targets_of
from lathe.verbs.export_parity import compared

FLOAT, INTEGER, TRAINED = "float32", "int8", "int8, qat"
TARGETS = {FLOAT: "onnx", INTEGER: "onnx_int8", TRAINED: "onnx_int8"}
# Trains in seconds on a CPU; on a GPU, the net of the published figures.
SMALL = (
    "model=resnet18",
    "data=digits",
    "data.image_size=16",
    "trainer.accelerator=cpu",
    "trainer.max_epochs=3",
)
PUBLISHED = ("experiment=cifar10_resnet50_amp",)
QUIET = ("trainer.enable_progress_bar=false", "trainer.enable_model_summary=false")
# Published for ResNet-50: a quarter of the size (plus scales, biases and the graph), a third of the latency, half a
# point of accuracy.
SIZE, LATENCY, POINTS = 0.26, 0.33, 0.5
MIB = 2**20


def measure(request: dict[str, Any], output: Path, tell: Callable[[str], None]) -> tuple[Facts, Results]:
    """Measure the latency of each form and batch size in each round, with the file's bytes and metric.

    `request["export"]` is the resolved `target` group of an export of `sides.FILES`.
    """
    for name in dict.fromkeys(TARGETS.values()):
        missing = export.get(name).available()
        require(missing is None, str(missing))
    runs = _runs(request, output, tell)
    results, facts = Results(), Facts()
    with torch.no_grad(), scratch() as folder:
        forms = {
            name: _form(name, run, folder / str(i), request["export"], tell)
            for i, (name, run) in enumerate(runs.items())
        }
        inputs = _inputs(runs[FLOAT])
        batches = {n: inputs[torch.arange(n) % len(inputs)].clone() for n in request["batches"]}
        calls = {
            n: {name: form.open(x, request["threads"]).call for name, (form, _) in forms.items()}
            for n, x in batches.items()
        }
        for number in range(request["rounds"]):
            for batch in batches:
                times = interleaved(calls[batch], request["steps"], request["warmup"])
                for name, (form, about) in forms.items():
                    side = f"{name}, batch {batch}"
                    facts[side] = {"form": name, "batch": batch, **about}
                    told = {
                        "latency_ms": times[name].median * 1e3,
                        "bytes": form.bytes,
                        about["metric"]: about["value"],
                    }
                    results.setdefault(side, []).append(told)
            tell(f"round {number + 1} of {request['rounds']}")
    return facts, results


def tables(facts: Facts, results: Results, request: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return a row for each form and batch size."""
    rows, heights = list[list[str]](), dict[str, dict[str, float]]()
    for side, about in facts.items():
        base = f"{FLOAT}, batch {about['batch']}"
        size, time = over(results, side, base, "bytes"), over(results, side, base, "latency_ms")
        latency = spread(results, side, "latency_ms")
        assert latency is not None  # every form runs in each round
        mine, theirs = results[side][0][about["metric"]], results[base][0][about["metric"]]
        rows.append(
            [
                about["form"],
                about["ranges"],
                str(about["batch"]),
                f"{about['bytes'] / MIB:.2f}",
                f"{size.median:.3f}" if size else "",
                latency.short,
                str(time or ""),
                f"{mine:.4f}",
                f"{mine - theirs:+.4f}",
            ]
        )
        heights[side] = {"latency, ms": latency.median / about["batch"]}
    first = next(iter(facts.values()))
    head = [
        *("form", "ranges", "batch", "MiB", "size over float32's", "latency, ms", "latency over float32's"),
        *(first["metric"], "beside float32's"),
    ]
    note = (
        f"Run {first['run']}: {first['net']}; {first['metric']} of the files themselves on {first['samples']} held-out "
        f"samples. ONNX Runtime on the CPU, uint8 pixels in; a round's latency is the median of {request['steps']} "
        "calls, of all forms in turns.\n"
    )
    if any(about["form"] == INTEGER and about["ranges"] == "trained" for about in facts.values()):
        note += "The run was trained with integers simulated: its float32 is the rounded weights as floats.\n"
    return [table(head, rows), note], plot.stacks("Latency of a sample", "ms", heights)


def claims(results: Results) -> list[Claim]:
    """Return the published figures of integers relative to float32."""
    found = list[Claim]()
    for side, rounds in results.items():
        form, _, batch = side.rpartition(", ")
        if form == FLOAT:
            continue
        base = f"{FLOAT}, {batch}"
        if not any(name.startswith(f"{form}: ") for name, _, _ in found):
            found.append((f"{form}: size over float32's,", over(results, side, base, "bytes"), {"at_most": SIZE}))
            if "accuracy" in rounds[0]:
                lost = 100 * (results[base][0]["accuracy"] - rounds[0]["accuracy"])
                found.append((f"{form}: points of accuracy lost,", Spread([lost]), {"at_most": POINTS}))
        latency = over(results, side, base, "latency_ms")
        found.append((f"{form}: latency at {batch} over float32's,", latency, {"at_most": LATENCY}))
    return found


def _runs(request: Mapping[str, Any], output: Path, tell: Callable[[str], None]) -> dict[str, RunDir]:
    """Return the run of each form: the request's, or those trained below `output`."""
    if request["run"] is not None:
        run = open_run(request["run"], "run")
        run.checkpoint("best")
        return {FLOAT: run, INTEGER: run}
    own = [str(word) for word in request["overrides"]]
    recipe = any(word.startswith("experiment=") for word in own)
    words = [*(() if recipe else PUBLISHED if request["accelerator"] == "gpu" else SMALL), *QUIET, *own]
    tell("training")
    run = _trained(words, output / "runs")
    if request["qat"] is None:
        return {FLOAT: run, INTEGER: run}
    further = (
        "compression=qat",
        "compression.receipt=none",
        f"trainer.max_epochs={request['qat']}",
        f"optimizer.lr={run.config['optimizer']['lr'] / 10}",  # trained weights move little
    )
    tell("training with integers simulated")
    return {FLOAT: run, INTEGER: run, TRAINED: _trained([*words, *further], output / "runs", run)}


def _trained(words: Sequence[str], below: Path, of: RunDir | None = None) -> RunDir:
    """Train with these overrides, from the weights of the run `of` if given."""
    cfg = compose(words)
    cfg.paths.log_dir = str(below)
    cfg.ckpt_path = None if of is None else str(of.path)
    return RunDir(train(cfg).dir)


def _form(
    name: str, run: RunDir, folder: Path, shared: Mapping[str, Any], tell: Callable[[str], None]
) -> tuple[Bundled, dict[str, Any]]:
    """Export a run for form `name`, compare the file with the net on held-out data, and return its facts.

    `shared` is the resolved `target` group of an export.
    """
    target = TARGETS[name]
    options = targets_of(shared)[target]
    folder.mkdir()
    ready = ready_for(target, options, run.path)
    facts = make(ready, target, options, folder)
    report = compared(run.path, ready, folder, target, options, shared)
    require(
        report["figures"] is not None,
        f"run={run.path}: its held-out data can't be opened, and what integers cost of its metric is what is measured.",
    )
    form = Bundled(folder, "made", report["arithmetic"])
    form.of = name
    value = report["figures"]["file"][report["metric"]]
    tell(f"{name}: {form.bytes / MIB:.2f} MiB, {report['metric']} {value:.4f}")
    about = {
        "run": run.path.name,
        "net": facts["net"],
        "ranges": "calibrated" if facts["calibrated"] else "trained" if facts["integers"] else "",
        "bytes": form.bytes,
        "metric": report["metric"],
        "value": value,
        "samples": report["samples"],
    }
    return form, about


def _inputs(run: RunDir) -> torch.Tensor:
    """Return held-out samples as clients send them."""
    ready = ready_for(TARGETS[FLOAT], {}, run.path)
    return ready.inputs_of(next(iter(ready.data.eval_loader("test" if ready.cfg["test"] else "val")))[0])
