"""A receipt for its readers: the verdict and findings, Markdown, a short table in the terminal, and a figure."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from lathe.measure.comparison import CLEAR, MARGIN
from lathe.measure.plot import beside, scatter
from lathe.runs.rundir import display_path

Row = Mapping[str, Any]
Receipt = Mapping[str, Any]
Rows = Sequence[Sequence[str]]
UNCLEAR = "within noise"
FLOAT_TWIN = {"onnx_int8": "onnx", "aot_inductor": "compiled_fp32"}  # the dense net's form, if it has another name
NOTHING = 1e-3  # a smaller share of zeros is not pruning: any net may have a few
WIDE = 1.5  # p90 / p10 of the same call: above this, other processes disturbed the measurement
PACKED = 0.9  # a weights file below this share of the exported file is reported
SHIPS = ("onnx_int8", "onnx", "aot_inductor", "weights")  # the first that exists is the file that ships
RUNTIMES = "Runtimes"
NETS = ("this net", "dense")
RUNTIME_COLUMNS = (
    *("runtime", "arithmetic", "batch", "threads", "ms (p10 to p90)", "n"),
    *("samples/s", "of eager", "of compiled bf16", "bytes"),
)
SIZES = {
    "parameters": "parameters",
    "non_zero": "non-zero parameters",
    "macs": "MACs of one sample",
    "effective_macs": "MACs with non-zero weights",
}


# Sentences


def findings(receipt: Receipt) -> list[str]:
    """Return the verdict, then a sentence for each result."""
    rows, kinds = receipt["latency"], set(receipt["compression"].values())
    sentences = [
        verdict(receipt),
        _chosen(receipt),
        *_metric(receipt),
        *_file(receipt),
        *_energy(receipt["energy"]),
        *(f"{_cell(row)}: {row['backend']} is the fastest form. {_compared(row)}." for row in fastest(receipt)),
        *busy(rows),
    ]
    for row in rows if "quantization" in receipt["structure"] else ():
        is_file = row["of"] == "this" and row["backend"] in ("onnx_int8", "aot_inductor")
        if is_file and row["beside_bf16"] in ("slower", "same"):
            sentences.append(
                f"{_cell(row)}: {row['backend']} is {_compared(row, 'bf16')}, which needs no quantization. Here int8 "
                "saves bytes, not time."
            )
    if receipt["size"]["sparsity"] >= NOTHING:
        file = shipped(receipt["files"])
        text = f"{receipt['size']['sparsity']:.1%} of the layers' weights are zero, which saves no time by itself"
        if file is not None and file["gzipped_ratio"] is not None:
            text += f"; gzipped, the file is {describe_size(file['gzipped_ratio'])}"
        sentences.append(text + ". Removed channels save time (compression=prune_channels).")
    if kinds == {"distillation"}:
        sentences.append("Distillation changes only weights: size and time are those of the configured net.")
    if not kinds:
        sentences.append("No compression is configured: this is the receipt of a net as it was trained.")
    return sentences


def verdict(receipt: Receipt) -> str:
    """Return one sentence on the fastest form at the smallest batch and on the file that ships."""
    row, file = next(iter(fastest(receipt)), None), shipped(receipt["files"])
    parts = [] if row is None else [f"{row['backend']} at batch {row['batch']} is {_compared(row, 'eager', 'twin')}"]
    if file is not None and file["ratio"] is not None:
        parts.append(f"the {file['target']} file is {describe_size(file['ratio'])}")
    return f"Verdict: {'; '.join(parts) or 'nothing could be compared'}."


def fastest(receipt: Receipt) -> list[Row]:
    """Return the fastest form of this net in each cell, in the order of measurement."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in receipt["latency"]:
        cell = row["device"], row["batch"], row["threads"]
        if row["of"] == "this" and (cell not in best or row["median_ms"] < best[cell]["median_ms"]):
            best[cell] = row
    return list(best.values())


def shipped(files: Iterable[Row]) -> Row | None:
    """Return the row of the file that ships."""
    own = {row["target"]: row for row in files if row["of"] == "this"}
    return next((own[target] for target in SHIPS if target in own), None)


def verdict_word(row: Row, key: str) -> str:
    """Return the verdict on a row; "within noise" if medians differ, but their ranges overlap."""
    word = row[f"beside_{key}"] or ""
    return UNCLEAR if word == "same" and abs(row[f"over_{key}"] - 1) > MARGIN else str(word)


def describe_speed(row: Row, key: str) -> str:
    """Describe a row's time relative to form `key`: 2.6x faster, 1.9x slower, equal; empty without it."""
    word = verdict_word(row, key)
    if word in ("faster", "slower"):
        return f"{_times(row[f'over_{key}'])} {word}"
    return {"same": "equal", UNCLEAR: "equal within noise"}.get(word, "")


def describe_size(ratio: float) -> str:
    """Describe a ratio of sizes: 3.5x smaller, 1.2x larger, the same size."""
    return "the same size" if abs(ratio - 1) <= MARGIN else f"{_times(ratio)} {'smaller' if ratio < 1 else 'larger'}"


def busy(
    rows: Iterable[Row], of: str = "dense", again: str = "python scripts/receipt.py run=<run directory>"
) -> list[str]:
    """Return a warning if eager calls of net `of` vary too much; `again` is the command to repeat."""
    spreads = [row["p90_ms"] / row["p10_ms"] for row in rows if (row["of"], row["backend"]) == (of, "eager")]
    wide = max(spreads, default=1.0)
    if wide < WIDE:
        return []
    return [f"The machine was busy: equal calls differ by a factor of {wide:.1f}. When it is idle, run {again}."]


def method(receipt: Receipt, warmup: int) -> list[str]:
    """Describe how the metrics were measured, and the criteria of a verdict."""
    baseline = receipt["baseline"]
    dense = f"the trained net of {baseline}" if baseline else "the configured net before compression, untrained"
    return [
        f"The dense net is {dense}; of dense there: over it in the same runtime, which is the gain of compression.",
        "Latency: all forms in one process, in rounds of one call of each in random order, each just after an untimed "
        f"call of its own; {warmup} calls to warm up. eager and compiled forms simulate integers in floating point.",
        f"faster and slower: the ranges from p10 to p90 are disjoint and the medians differ by more than {MARGIN:.0%}, "
        f"or the medians differ by a factor of {CLEAR}. {UNCLEAR}: they differ by more, in overlapping ranges.",
        "Files take what the net takes; scripts/export.py puts the preprocessing of pixels in front.",
        "MACs count matrix products, convolutions and attention of one sample.",
    ]


def _times(ratio: float) -> str:
    factor = max(ratio, 1 / ratio)
    return f"{factor:.1f}x" if factor >= 1.1 else f"{factor:.2f}x"


def _cell(row: Row) -> str:
    threads = "" if row["threads"] is None else f", {row['threads']} thread{'s' * (row['threads'] > 1)}"
    return f"Batch {row['batch']} on {row['device']}{threads}"


def _compared(row: Row, *keys: str) -> str:
    runtime = FLOAT_TWIN.get(row["backend"], row["backend"])
    twins = {"onnx": "the dense ONNX file", "aot_inductor": "the dense AOTInductor file"}
    names = {"eager": "PyTorch eager", "bf16": "the dense net compiled in bf16"}
    if row["backend"] != "eager":  # its twin is also eager
        names["twin"] = twins.get(row["backend"]) or twins.get(str(runtime)) or f"the dense net in {runtime}"
    texts = []
    for key in [key for key in keys or names if key in names]:
        factor = describe_speed(row, key)
        if factor.startswith("equal"):
            texts.append(f"as fast as {names[key]}{factor.removeprefix('equal')}")
        elif factor:
            texts.append(f"{factor} than {names[key]}")
    return ", ".join(texts) or "not compared"


def _chosen(receipt: Receipt) -> str:
    chosen, split = receipt["chosen"], receipt["split"]
    own = next((row for row in receipt["figures"] if row["of"] == "this" and row["split"] == "val"), None)
    value = own["figures"].get(chosen["by"].rpartition("/")[2]) if own else None
    shown = "" if value is None else f" ({value:.4f})"
    unseen = "The test split had no part in the choice" if split == "test" else "test=false keeps the test split unseen"
    return f"Measured: best.ckpt of step {chosen['step']}, chosen by {chosen['by']}{shown}. {unseen}."


def _eager(receipt: Receipt) -> tuple[Row | None, Row | None]:
    """Return the rows of metrics of this net and of the dense one."""
    rows = [row for row in receipt["figures"] if (row["backend"], row["split"]) == ("eager", receipt["split"])]
    own, dense = (next((row for row in rows if row["of"] == of), None) for of in ("this", "dense"))
    return own, dense


def _metric(receipt: Receipt) -> Iterator[str]:
    own, dense = _eager(receipt)
    if own is None:
        return
    text = f"{receipt['split']}/{receipt['metric']}: {own['figures'][receipt['metric']]:.4f}"
    if dense is None:
        yield f"{text}. For the metrics of a trained dense net add baseline=<run directory>."
        return
    text = f"{text}; dense net: {dense['figures'][receipt['metric']]:.4f}."
    agreement = own["agreement"]
    if agreement is None:
        yield text
    elif agreement["share"] is None:
        yield f"{text} Outputs differ by {agreement['largest']:.3g} at most."
    else:
        yield f"{text} {agreement['share']:.4f} of {agreement['n']} predictions are equal."


def _energy(energy: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    for name, of in (("energy_gpu_j", "GPUs"), ("energy_cpu_j", "processors")):
        joules, dense = energy["this"].get(name), energy["dense"].get(name)
        if joules is not None:
            other = "" if dense is None else f"; dense net: {dense / 3600:.3g} Wh"
            yield f"Training took {joules / 3600:.3g} Wh of the {of}{other}."


def _file(receipt: Receipt) -> Iterator[str]:
    row = shipped(receipt["files"])
    if row is None:
        yield "No file could be exported. See what was not measured."
        return
    text = f"File {row['target']}: {row['bytes']:,} bytes, {row['gzipped']:,} gzipped"
    if row["ratio"] is not None:
        plain, gzipped = (describe_size(row[key]) for key in ("ratio", "gzipped_ratio"))
        text += f"; compared with the dense file {plain}, gzipped {gzipped}"
    yield f"{text}."
    packed = next((other for other in receipt["files"] if (other["of"], other["target"]) == ("this", "weights")), row)
    if packed["bytes"] < PACKED * row["bytes"]:
        yield (
            f"File weights (for torch, packed bits): {packed['bytes']:,} bytes, {packed['gzipped']:,} gzipped. "
            f"{row['target']} stores at least a byte for each weight."
        )
    if receipt.get("undeclared"):
        yield f"It can't be exported: the data declare {receipt['undeclared']}."
    else:
        yield f"Export it with python scripts/export.py run=<run directory> target={row['target']}."


# The terminal


@contextmanager
def progress(about: str) -> Iterator[Callable[[str], None]]:
    """Give a function that draws what is measured next, without a drawing thread, which would disturb measurements."""
    text, is_terminal = f"Measuring the receipt (about {about})", Console().is_terminal
    if not is_terminal:
        print(text, flush=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    with Progress(*columns, auto_refresh=False, transient=True, disable=not is_terminal) as bar:
        task = bar.add_task(text)
        yield lambda now: bar.update(task, description=f"{text}: {now}", refresh=True)


def show(receipt: Receipt, run: Path) -> None:
    """Print a short table, the verdict, and the path of the receipt of `run`."""
    console = Console()
    table = Table(title="Receipt", title_justify="left")
    dense = "dense net" if receipt["dense"]["trained"] else "dense net, untrained"
    for name in ("", "this net", dense, "this net is"):
        table.add_column(name, justify="left" if name in ("", "this net is") else "right")
    for row in _short(receipt):
        table.add_row(*row)
    console.print(table)
    for text in receipt["warnings"]:
        console.print(f"Warning: {text}", style="bold red", soft_wrap=True, highlight=False)
    again = f"python scripts/receipt.py run={display_path(run)}"
    lines = [verdict(receipt), *busy(receipt["latency"], again=again)]
    if receipt["left_out"]:
        lines.append(f"Not measured: {', '.join(entry['form'] for entry in receipt['left_out'])}.")
    print(*lines, f"Details: {display_path(run / 'receipt.md')}", sep="\n")


def _short(receipt: Receipt) -> Iterator[Sequence[str]]:
    """Yield rows for the screen: metric, exported file, changed sizes, and the fastest form per cell."""
    metric, size = receipt["metric"], receipt["size"]
    own, dense = _eager(receipt)
    if own is not None:
        other = "-" if dense is None else _number(dense["figures"].get(metric))
        yield f"{receipt['split']}/{metric}", _number(own["figures"].get(metric)), other, ""
        if own["agreement"] and own["agreement"]["share"] is not None:
            yield "equal predictions", f"{own['agreement']['share']:.1%}", "", ""
    file = shipped(receipt["files"])
    if file is not None:
        columns = ((f"{file['target']} file", "bytes", "ratio"), ("gzipped", "gzipped", "gzipped_ratio"))
        for title, key, share in columns:
            ratio = file[share]
            other = "-" if ratio is None else _bytes(file[key] / ratio)
            yield title, _bytes(file[key]), other, "" if ratio is None else describe_size(ratio)
    for title, key in (("parameters", "parameters"), ("non-zero parameters", "non_zero"), ("MACs", "macs")):
        this, full = size[key], receipt["dense"]["size"][key]
        if this != full and full:
            yield title, f"{this:,}", f"{full:,}", describe_size(this / full)
    for row in fastest(receipt):
        threads = "" if row["threads"] in (None, 1) else f", {row['threads']} threads"
        device = "" if row["device"] == "cpu" else f", {row['device']}"
        other = "-" if row["over_twin"] is None else f"{row['median_ms'] / row['over_twin']:.3f} ms"
        title = f"{row['backend']}, batch {row['batch']}{threads}{device}"
        yield title, f"{row['median_ms']:.3f} ms", other, describe_speed(row, "twin")


def _bytes(count: float) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


# Files


def markdown(receipt: Receipt) -> str:
    """Return the whole receipt as one page."""
    parts = [f"# Receipt: {receipt['name']}", *(f"**Warning: {text}**" for text in receipt["warnings"])]
    parts += [_list(receipt["findings"]), "![accuracy against latency and size](receipt.svg)"]
    for title, header, rows in sections(receipt):
        parts += [f"## {title}", _table(header, rows)]
        if title == RUNTIMES:
            section = receipt["inference"]
            cpu, versions = section["hardware"]["cpu"], section["versions"].items()
            parts += [
                f"suite=inference of {section['measured']}, best.ckpt of step {section['checkpoint']['step']}; "
                f"{cpu['name']}, {cpu['cores']} cores; {', '.join(f'{name} {version}' for name, version in versions)}.",
                _list(runtime_sentences(section)),
            ]
    if receipt["left_out"]:
        parts += ["## Not measured", _list(f"{entry['form']}: {entry['reason']}" for entry in receipt["left_out"])]
    return "\n\n".join([*parts, "## How it was measured", _list(receipt["method"])]) + "\n"


def sections(receipt: Receipt) -> list[tuple[str, Sequence[str], Rows]]:
    """Return titles, headers and rows of the receipt's tables that have rows."""
    size, dense = receipt["size"], receipt["dense"]["size"]
    names = list(dict.fromkeys(name for row in receipt["figures"] for name in row["figures"]))
    metrics = []
    for row in receipt["figures"]:
        agreement = row["agreement"]
        both = (_number(agreement["share"]), f"{agreement['largest']:.3g}") if agreement else ("", "")
        values = [_number(row["figures"].get(name)) for name in names]
        metrics.append((row["of"], row["backend"], row["split"], *values, *both))
    latency = [
        (
            *(row["of"], row["backend"], row["device"] + (f" x {row['threads']}" if row["threads"] else "")),
            *(str(row["batch"]), times(row), str(row["n"])),
            *(relative(row, other) for other in ("eager", "bf16", "twin")),
        )
        for row in receipt["latency"]
    ]
    files = [
        (
            *(row["of"], row["target"], f"{row['bytes']:,}", _number(row["ratio"], 3)),
            *(f"{row['gzipped']:,}", _number(row["gzipped_ratio"], 3)),
        )
        for row in receipt["files"]
    ]
    sizes = [
        (text, f"{size[key]:,}", f"{dense[key]:,}", _number(size[key] / dense[key] if dense[key] else None, 3))
        for key, text in SIZES.items()
    ]
    memory = [(row["of"], row["device"], str(row["batch"]), f"{row['bytes'] / 1e6:.2f}") for row in receipt["memory"]]
    layers = [
        (
            *(row["name"], " x ".join(map(str, row["shape"])), f"{row['weights']:,}", _number(row["sparsity"])),
            *(_number(row["integer_sparsity"]), f"{row['macs']:,}"),
        )
        for row in receipt["layers"]
    ]
    cpu, gpu = receipt["hardware"]["cpu"], receipt["hardware"]["gpu"]
    hardware = [("CPU", f"{cpu['name']}, {cpu['cores']} cores, {', '.join(cpu['instruction_sets'])}")]
    if gpu:
        hardware.append(("GPU", f"{gpu['name']}, compute capability {gpu['compute_capability']}, CUDA {gpu['cuda']}"))
    ratios = ("of dense eager", "of dense bf16", "of dense there")
    tables: list[tuple[str, Sequence[str], Rows]] = [
        ("Figures", ("net", "back end", "split", *names, "equal to dense", "outputs differ by"), metrics),
        ("Latency", ("net", "back end", "on", "batch", "ms (p10 to p90)", "n", *ratios), latency),
        (RUNTIMES, *runtime_table(receipt.get("inference", {}).get("rows", ()))),
        ("Files", ("net", "target", "bytes", "of dense", "gzipped", "of dense"), files),
        ("Size", ("what", "this net", "dense", "of dense"), sizes),
        ("Peak memory of a forward pass, eager", ("net", "device", "batch", "MB"), memory),
        ("Layers", ("layer", "weight", "weights", "sparsity", "zeros among integers", "MACs of one sample"), layers),
        ("Hardware and versions", ("what", "value"), [*hardware, *receipt["versions"].items()]),
    ]
    return [section for section in tables if section[2]]


def figure(receipt: Receipt) -> str:
    """Return two plots as SVG: the metric against latency at the smallest batch, and against file size."""
    metric, split = receipt["metric"], receipt["split"]
    scores = {(row["of"], row["backend"]): row["figures"] for row in receipt["figures"] if row["split"] == split}

    def point(row: Row, backend: str, x: float) -> tuple[str, float, float, str]:
        """Return a back end's score, else the module's, else nan, which is not drawn."""
        figures = scores.get((row["of"], backend)) or scores.get((row["of"], "eager")) or {}
        return backend, x, figures.get(metric, float("nan")), NETS[row["of"] != "this"]

    least = min((row["batch"] for row in receipt["latency"]), default=1)
    times = [row for row in receipt["latency"] if row["batch"] == least and row["threads"] == 1]
    latency = [point(row, row["backend"], row["median_ms"]) for row in times]
    sizes = [point(row, row["target"], row["bytes"] / 1e6) for row in receipt["files"]]
    title, x_name = f"{split}/{metric} against latency", f"ms, batch {least}, 1 thread (log scale)"
    plots = [scatter(title, x_name, metric, latency, NETS, log_x=True)]
    title, x_name = f"{split}/{metric} against size", "MB of the file (log scale)"
    return beside([*plots, scatter(title, x_name, metric, sizes, NETS, log_x=True)])


# The comparison of a run's runtimes, which suite=inference adds as plain data: `rows` of `time_forms`, each with
# `arithmetic`, `samples_per_s` and `bytes` (None for the module); `left_out`, `notes`, `hardware`, `versions`, and the
# `checkpoint` that was measured.


def times(row: Row) -> str:
    return f"{row['median_ms']:.3f} ({row['p10_ms']:.3f} to {row['p90_ms']:.3f})"


def relative(row: Row, key: str) -> str:
    """Return a row's time over that of form `key` with the verdict; empty without it."""
    return "" if row[f"over_{key}"] is None else f"{row[f'over_{key}']:.3f} {verdict_word(row, key)}".strip()


def runtime_table(rows: Iterable[Row]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return the header and the rows, the fastest of each cell first."""
    return RUNTIME_COLUMNS, [
        (
            *(row["backend"], row["arithmetic"], str(row["batch"]), str(row["threads"]), times(row), str(row["n"])),
            *(f"{row['samples_per_s']:,.0f}", relative(row, "eager"), relative(row, "bf16")),
            "" if row["bytes"] is None else f"{row['bytes']:,}",
        )
        for row in sorted(rows, key=lambda row: (row["batch"], row["threads"], row["median_ms"]))
    ]


def runtime_sentences(section: Mapping[str, Any]) -> list[str]:
    """Return the winners, the notes, and what was not measured with the reason."""
    missing = [f"Not measured: {entry['form']}: {entry['reason']}" for entry in section["left_out"]]
    return [*(winner["sentence"] for winner in section["winners"]), *section["notes"], *missing]


def _number(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(header: Sequence[str], rows: Rows) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
