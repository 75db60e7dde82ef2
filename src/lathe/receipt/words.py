"""What a receipt says in sentences: its findings, and how they were made."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lathe.measure.latency import CLEAR, MARGIN
from lathe.receipt.facts import NOTHING
from lathe.receipt.timing import UNCLEAR, told_verdict

Row = Mapping[str, Any]
WIDE = 1.5  # p90 over p10 of one and the same call: above this, other processes took part in the measurement
PACKED = 0.9  # a file of weights that is below this share of the file that ships is worth a sentence
SHIPS = ("onnx_int8", "onnx", "aot_inductor", "weights")  # the first that was made is called the file that ships


def findings(receipt: Mapping[str, Any]) -> list[str]:
    """One sentence for each thing that a reader should know, bad news included."""
    found = [
        _chosen(receipt),
        *_metric(receipt),
        *_file(receipt),
        *_energy(receipt["energy"]),
        *_fastest(receipt["latency"]),
        *busy(receipt["latency"]),
    ]
    if "quantization" in receipt["structure"]:
        found += _integers_beside_bf16(receipt["latency"])
    if receipt["size"]["sparsity"] >= NOTHING:
        found.append(_zeros(receipt))
    kinds = set(receipt["compression"].values())
    if kinds == {"distillation"}:
        found.append("Distillation alone changes weights: size and time are those of the configured net.")
    if not kinds:
        found.append("No compression is configured: this is the receipt of a net as it was trained.")
    return [text for text in found if text]


def _chosen(receipt: Mapping[str, Any]) -> str:
    chosen, split = receipt["chosen"], receipt["split"]
    own = next((row for row in receipt["figures"] if row["of"] == "this" and row["split"] == "val"), None)
    value = own["figures"].get(chosen["by"].rpartition("/")[2]) if own else None
    told = "" if value is None else f", {value:.4f}"
    kept = "the test split had no part in the choice" if split == "test" else "test=false keeps the test split unseen"
    return f"The net is best.ckpt of step {chosen['step']}, chosen by {chosen['by']}{told}; {kept}."


def _metric(receipt: Mapping[str, Any]) -> list[str]:
    split, metric = receipt["split"], receipt["metric"]
    rows = {(row["of"], row["backend"]): row for row in receipt["figures"] if row["split"] == split}
    own, dense = rows.get(("this", "eager")), rows.get(("dense", "eager"))
    if own is None:
        return []
    text = f"{split}/{metric} of the module is {own['figures'][metric]:.4f}"
    if dense is None:
        return [
            f"{text}; no baseline given, so there is no dense metric and no agreement: baseline=<run directory> "
            "gives them."
        ]
    told = own["agreement"]
    equal = (
        f"their outputs differ by {told['largest']:.3g} at most"
        if told["share"] is None
        else f"{told['share']:.4f} of their {told['n']} predictions are equal"
    )
    return [f"{text}, of the dense net {dense['figures'][metric]:.4f}; {equal}."]


def _energy(energy: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    for name, of in (("energy_gpu_j", "its GPUs"), ("energy_cpu_j", "the processors of its machines")):
        joules, dense = energy["this"].get(name), energy["dense"].get(name)
        if joules is not None:
            beside = "" if dense is None else f", that of the dense net {dense / 3600:.3g} Wh"
            yield f"Training took {joules / 3600:.3g} Wh of {of}{beside}."


def _file(receipt: Mapping[str, Any]) -> list[str]:
    row = shipped(receipt["files"])
    if row is None:
        return ["No file could be exported: see what was not measured."]
    text = f"The file that ships ({row['target']}) has {row['bytes']:,} bytes, {row['gzipped']:,} after gzip"
    if row["ratio"] is not None:
        text += f": {row['ratio']:.3f} and {row['gzipped_ratio']:.3f} of the dense net's"
    found = [f"{text}."]
    packed = next((other for other in receipt["files"] if (other["of"], other["target"]) == ("this", "weights")), row)
    if packed["bytes"] < PACKED * row["bytes"]:
        found.append(
            f"Its weights alone, packed into their bits for torch (weights), have {packed['bytes']:,} bytes, "
            f"{packed['gzipped']:,} after gzip; {row['target']} stores at least a byte for each."
        )
    if receipt.get("undeclared"):
        return [*found, f"No export ships it, for its data declare {receipt['undeclared']}."]
    return [*found, f"python scripts/export.py run=<run directory> target={row['target']} ships it."]


def shipped(files: Iterable[Row]) -> Row | None:
    """The row of the file that ships."""
    own = {row["target"]: row for row in files if row["of"] == "this"}
    return next((own[target] for target in SHIPS if target in own), None)


def _fastest(rows: Iterable[Row]) -> list[str]:
    """For each cell the fastest form of this net."""
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["of"] == "this":
            cells.setdefault(_cell(row), []).append(row)
    found = []
    for some in cells.values():
        best = min(some, key=lambda row: row["median_ms"])
        beside = [
            f"{best[f'over_{key}']:.2f} of the time of the dense net {name} ({told_verdict(best, key)})"
            for key, name in (("eager", "in eager fp32"), ("bf16", "compiled in bf16"), ("twin", "in the same runtime"))
            if best[f"over_{key}"] is not None
        ]
        found.append(
            f"{_where(best)}: {best['backend']} is this net's fastest, {best['median_ms']:.3f} ms, {', '.join(beside)}."
        )
    return found


def busy(
    rows: Iterable[Row], of: str = "dense", again: str = "python scripts/receipt.py run=<run directory>"
) -> list[str]:
    """A sentence if calls of one and the same net, `of` in eager, differ too much; `again` is the command that measures
    anew.
    """
    wide = max(
        (row["p90_ms"] / row["p10_ms"] for row in rows if (row["of"], row["backend"]) == (of, "eager")), default=1.0
    )
    if wide < WIDE:
        return []
    whose = "dense" if of == "dense" else "eager"
    return [
        f"The machine was busy: the {whose} net's own calls differ by a factor of {wide:.1f} (p90 over p10); measure "
        f"again when it is idle: {again}."
    ]


def _cell(row: Row) -> tuple[Any, ...]:
    return row["device"], row["batch"], row["threads"]


def _where(row: Row) -> str:
    threads = "" if row["threads"] is None else f", {row['threads']} thread{'s' * (row['threads'] > 1)}"
    return f"Batch {row['batch']} on {row['device']}{threads}"


def _integers_beside_bf16(rows: Iterable[Row]) -> list[str]:
    found = []
    for row in rows:
        if (
            row["of"] == "this"
            and row["backend"] in ("onnx_int8", "aot_inductor")
            and row["beside_bf16"] in ("slower", "same")
        ):
            word = "slower than" if row["beside_bf16"] == "slower" else "no faster than"
            found.append(
                f"{_where(row)}: the integers of {row['backend']} are {word} the dense net compiled in bf16 "
                f"({row['over_bf16']:.2f} of its time), which needs no quantization: here they buy bytes, not time."
            )
    return found


def _zeros(receipt: Mapping[str, Any]) -> str:
    """What zeros do not buy."""
    rows = {(row["of"], row["backend"], *_cell(row)): row for row in receipt["latency"]}
    pairs = []
    for (of, backend, *cell), row in rows.items():
        dense = rows.get(("dense", backend, *cell))
        if of == "this" and dense is not None:
            pairs.append(
                f"{backend} {row['median_ms']:.3f} ms beside the dense {dense['median_ms']:.3f} ms at batch "
                f"{row['batch']}"
            )
    file = shipped(receipt["files"])
    text = (
        f"{receipt['size']['sparsity']:.1%} of the layers' weights are zero, which buys no time by itself: they are "
        "stored and computed "
    )
    text += "like any other weight"
    if pairs and not receipt["structure"]:  # else the nets differ in more than zeros
        text += f" ({'; '.join(pairs[:4])})"
    if file is not None and file["gzipped_ratio"] is not None:
        text += f". What they buy is {file['gzipped_ratio']:.3f} of the gzipped bytes"
    return text + "; channels that are removed (compression=prune_channels) buy time."


def method(receipt: Mapping[str, Any], warmup: int) -> list[str]:
    """How the metrics were made, and what decides a verdict."""
    dense = f"the trained net of {receipt['baseline']}"
    if not receipt["baseline"]:
        dense = "the configured net before compression, with random weights"
    lines = [
        f"The dense net is {dense}.",
        "Latency: all forms in one process, in rounds of one call of each in an order drawn anew, each just after an "
        f"untimed call of its own; {warmup} calls to warm up; n, median, 10th and 90th percentile as in the table.",
        f"faster and slower: the ranges from p10 to p90 lie apart and the medians differ by more than {MARGIN:.0%}, or "
        f"the medians differ by a factor of {CLEAR} and more. same: the medians differ by {MARGIN:.0%} at most. "
        f"{UNCLEAR}: they differ by more, but the ranges overlap, so that it may be noise (same in receipt.json).",
        "of dense there: of the time of the dense float32 net in the same runtime: what compression has gained. The "
        "columns before it hold what the runtime gains for any net, too.",
        "compiled: torch.compile with inductor and frozen weights, for the one batch size; bf16 by autocast.",
        "Files take what the net takes and were kept only to be measured"
        + ("." if receipt.get("undeclared") else "; scripts/export.py puts the preprocessing of pixels in front."),
        "MACs count matrix products, convolutions and attention of one sample. MACs with non-zero weights are what "
        "zeros would save on hardware that skips them.",
        "Peak memory counts tensors, the net's own included.",
        "Metrics of the eager module are in float32 on the CPU.",
    ]
    if "quantization" in receipt["structure"]:
        lines.append(
            "eager and compiled forms of this net simulate its integers in floating point: they are slower than what "
            "ships."
        )
    return lines
