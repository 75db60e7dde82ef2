"""A receipt as Markdown, as tables in the terminal, and as a figure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from lathe.measure.plot import beside, scatter
from lathe.receipt import runtimes, words
from lathe.receipt.timing import told_verdict
from lathe.runs.rundir import display_path

Rows = Sequence[Sequence[str]]
RUNTIMES = "Runtimes"
NETS = ("this net", "dense")


def markdown(receipt: Mapping[str, Any]) -> str:
    """Return the whole receipt as one page."""
    parts = [f"# Receipt: {receipt['name']}", *(f"**Warning: {text}**" for text in receipt["warnings"])]
    parts += [
        "\n".join(f"- {text}" for text in receipt["findings"]),
        f"![accuracy against latency and size]({receipt['figure']})",
    ]
    for title, header, rows in sections(receipt):
        parts += [f"## {title}", _table(header, rows)]
        if title == RUNTIMES:
            parts += [
                _measured(receipt["inference"]),
                "\n".join(f"- {text}" for text in runtimes.sentences(receipt["inference"])),
            ]
    for title, lines in (
        ("Not measured", [f"{entry['form']}: {entry['reason']}" for entry in receipt["left_out"]]),
        ("How it was measured", receipt["method"]),
    ):
        if lines:
            parts += [f"## {title}", "\n".join(f"- {line}" for line in lines)]
    return "\n\n".join(part for part in parts if part) + "\n"


@contextmanager
def progress(about: str) -> Iterator[Progress]:
    """Yield a progress bar without a drawing thread, which would disturb measurements."""
    text, terminal = f"Measuring the receipt (about {about})", Console().is_terminal
    if not terminal:
        print(text, flush=True)
    columns = (TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[now]}"))
    with Progress(*columns, auto_refresh=False, transient=True, disable=not terminal) as bar:
        bar.add_task(text, now="")
        yield bar


def show(receipt: Mapping[str, Any], run: Path, console: Console | None = None) -> None:
    """Print a short table, the verdict, and the path of the receipt of `run`."""
    console = console or Console()
    table = Table(title="Receipt", title_justify="left")
    dense = "dense net" if receipt["dense"]["trained"] else "dense net, untrained"
    for name in ("", "this net", dense, "this net is"):
        table.add_column(name, justify="left" if name in ("", "this net is") else "right")
    for row in _short(receipt):
        table.add_row(*row)
    console.print(table)
    for text in receipt["warnings"]:
        console.print(f"Warning: {text}", style="bold red", soft_wrap=True, highlight=False)
    lines = [
        words.verdict(receipt),
        *words.busy(receipt["latency"], again=f"python scripts/receipt.py run={display_path(run)}"),
    ]
    if receipt["left_out"]:
        lines.append(f"Not measured: {', '.join(entry['form'] for entry in receipt['left_out'])}.")
    for text in (*lines, f"Details: {display_path(run / 'receipt.md')}"):
        console.print(text, soft_wrap=True, highlight=False, markup=False)


def _short(receipt: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """Yield rows for the screen: metric, exported file, changed sizes, and the fastest form per cell."""
    split, metric, size = receipt["split"], receipt["metric"], receipt["size"]
    scores = {(row["of"], row["backend"]): row for row in receipt["figures"] if row["split"] == split}
    own, dense = scores.get(("this", "eager")), scores.get(("dense", "eager"))
    if own is not None:
        other = "-" if dense is None else _number(dense["figures"].get(metric))
        yield f"{split}/{metric}", _number(own["figures"].get(metric)), other, ""
        if own["agreement"] and own["agreement"]["share"] is not None:
            yield "equal predictions", f"{own['agreement']['share']:.1%}", "", ""
    file = words.shipped(receipt["files"])
    if file is not None:
        for title, key, share in (
            (f"{file['target']} file", "bytes", "ratio"),
            ("gzipped", "gzipped", "gzipped_ratio"),
        ):
            ratio = file[share]
            other = "-" if ratio is None else _bytes(file[key] / ratio)
            yield title, _bytes(file[key]), other, "" if ratio is None else words.resized(ratio)
    for title, key in (("parameters", "parameters"), ("non-zero parameters", "non_zero"), ("MACs", "macs")):
        this, full = size[key], receipt["dense"]["size"][key]
        if this != full and full:
            yield title, f"{this:,}", f"{full:,}", words.resized(this / full)
    for row in words.fastest(receipt):
        threads = "" if row["threads"] in (None, 1) else f", {row['threads']} threads"
        device = "" if row["device"] == "cpu" else f", {row['device']}"
        other = "-" if row["over_twin"] is None else f"{row['median_ms'] / row['over_twin']:.3f} ms"
        title = f"{row['backend']}, batch {row['batch']}{threads}{device}"
        yield title, f"{row['median_ms']:.3f} ms", other, words.sped(row, "twin")


def _bytes(count: float) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def sections(receipt: Mapping[str, Any]) -> list[tuple[str, Sequence[str], Rows]]:
    """Return titles, headers and rows of the receipt's tables that have rows."""
    found = [
        _metrics(receipt),
        _latency(receipt["latency"]),
        (RUNTIMES, *runtimes.table(receipt.get("inference", {}).get("rows", ()))),
        _files(receipt["files"]),
        _size(receipt),
        (
            "Peak memory of a forward pass, eager",
            ("net", "device", "batch", "MB"),
            [(row["of"], row["device"], str(row["batch"]), f"{row['bytes'] / 1e6:.2f}") for row in receipt["memory"]],
        ),
        _layers(receipt["layers"]),
        ("Hardware and versions", ("what", "value"), [*_hardware(receipt["hardware"]), *receipt["versions"].items()]),
    ]
    return [(title, header, rows) for title, header, rows in found if rows]


def _metrics(receipt: Mapping[str, Any]) -> tuple[str, Sequence[str], Rows]:
    rows = receipt["figures"]
    names = list(dict.fromkeys(name for row in rows for name in row["figures"]))
    header = ("net", "back end", "split", *names, "equal to dense", "outputs differ by")
    lines = []
    for row in rows:
        told = row["agreement"]
        both = (_number(told["share"]), f"{told['largest']:.3g}") if told else ("", "")
        lines.append(
            (row["of"], row["backend"], row["split"], *(_number(row["figures"].get(name)) for name in names), *both)
        )
    return "Figures", header, lines


def _latency(rows: Iterable[Mapping[str, Any]]) -> tuple[str, Sequence[str], Rows]:
    header = (
        "net",
        "back end",
        "on",
        "batch",
        "ms (p10 to p90)",
        "n",
        "of dense eager",
        "of dense bf16",
        "of dense there",
    )
    lines = []
    for row in rows:
        times = f"{row['median_ms']:.3f} ({row['p10_ms']:.3f} to {row['p90_ms']:.3f})"
        beside = [
            f"{_ratio(row[f'over_{other}'])} {told_verdict(row, other)}".strip() for other in ("eager", "bf16", "twin")
        ]
        where = row["device"] if row["threads"] is None else f"{row['device']} x {row['threads']}"
        lines.append((row["of"], row["backend"], where, str(row["batch"]), times, str(row["n"]), *beside))
    return "Latency", header, lines


def _files(rows: Iterable[Mapping[str, Any]]) -> tuple[str, Sequence[str], Rows]:
    lines = [
        (
            row["of"],
            row["target"],
            f"{row['bytes']:,}",
            _ratio(row["ratio"]),
            f"{row['gzipped']:,}",
            _ratio(row["gzipped_ratio"]),
        )
        for row in rows
    ]
    return "Files", ("net", "target", "bytes", "of dense", "gzipped", "of dense"), lines


def _size(receipt: Mapping[str, Any]) -> tuple[str, Sequence[str], Rows]:
    size, dense = receipt["size"], receipt["dense"]["size"]
    names = {
        "parameters": "parameters",
        "non_zero": "non-zero parameters",
        "macs": "MACs of one sample",
        "effective_macs": "MACs with non-zero weights",
    }
    rows = [
        (text, f"{size[key]:,}", f"{dense[key]:,}", _ratio(size[key] / dense[key] if dense[key] else None))
        for key, text in names.items()
    ]
    return "Size", ("what", "this net", "dense", "of dense"), rows


def _layers(layers: Iterable[Mapping[str, Any]]) -> tuple[str, Sequence[str], Rows]:
    lines = []
    for layer in layers:
        integers = "" if layer["integer_sparsity"] is None else f"{layer['integer_sparsity']:.4f}"
        shape = " x ".join(str(n) for n in layer["shape"])
        lines.append(
            (layer["name"], shape, f"{layer['weights']:,}", f"{layer['sparsity']:.4f}", integers, f"{layer['macs']:,}")
        )
    return "Layers", ("layer", "weight", "weights", "sparsity", "zeros among integers", "MACs of one sample"), lines


def _hardware(hardware: Mapping[str, Any]) -> Rows:
    cpu, gpu = hardware["cpu"], hardware["gpu"]
    rows = [
        ("CPU", cpu["name"]),
        ("cores", str(cpu["cores"])),
        ("instruction sets", ", ".join(cpu["instruction_sets"]) or "unknown"),
    ]
    if gpu:
        rows.append(("GPU", f"{gpu['name']}, compute capability {gpu['compute_capability']}, CUDA {gpu['cuda']}"))
    return rows


def figure(receipt: Mapping[str, Any]) -> str:
    """Return two plots as SVG: the metric against latency at the smallest batch, and against file size."""
    metric, split = receipt["metric"], receipt["split"]
    scores = {
        (row["of"], row["backend"]): row["figures"].get(metric) for row in receipt["figures"] if row["split"] == split
    }
    least = min((row["batch"] for row in receipt["latency"]), default=1)
    times = [row for row in receipt["latency"] if row["batch"] == least and row["threads"] == 1]
    points = [(row["backend"], row["median_ms"], _score(scores, row["of"], row["backend"]), _of(row)) for row in times]
    sizes = [
        (row["target"], row["bytes"] / 1e6, _score(scores, row["of"], row["target"]), _of(row))
        for row in receipt["files"]
    ]
    title = f"{split}/{metric} against {{}}"
    plots = [
        scatter(title.format("latency"), f"ms, batch {least}, 1 thread (log scale)", metric, points, NETS, log_x=True),
        scatter(title.format("size"), "MB of the file (log scale)", metric, sizes, NETS, log_x=True),
    ]
    return beside(plots)


def _measured(section: Mapping[str, Any]) -> str:
    cpu, versions = (
        section["hardware"]["cpu"],
        ", ".join(f"{name} {version}" for name, version in section["versions"].items()),
    )
    return (
        f"suite=inference of {section['measured']}, best.ckpt of step {section['checkpoint']['step']}; {cpu['name']}, "
        f"{cpu['cores']} cores; {versions}."
    )


def _of(row: Mapping[str, Any]) -> str:
    return NETS[row["of"] != "this"]


def _score(scores: Mapping[tuple[str, str], float | None], of: str, backend: str) -> float:
    """Return the score of a back end, else of the module, else nan, which is not drawn."""
    found = scores.get((of, backend))
    found = scores.get((of, "eager")) if found is None else found
    return float("nan") if found is None else found


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _table(header: Sequence[str], rows: Rows) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
