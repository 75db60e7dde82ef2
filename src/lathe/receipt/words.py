"""The sentences of a receipt: the verdict, the findings, and the method of measurement."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lathe.measure.latency import CLEAR, MARGIN
from lathe.receipt.facts import NOTHING
from lathe.receipt.timing import FLOAT_TWIN, UNCLEAR, told_verdict

Row = Mapping[str, Any]
WIDE = 1.5  # p90 / p10 of the same call: above this, other processes disturbed the measurement
PACKED = 0.9  # a weights file below this share of the exported file is reported
SHIPS = ("onnx_int8", "onnx", "aot_inductor", "weights")  # the first that exists is the file that ships
REFERENCES = {"eager": "PyTorch eager", "bf16": "the dense net compiled in bf16"}
TWINS = {"onnx": "the dense ONNX file", "aot_inductor": "the dense AOTInductor file"}


def findings(receipt: Mapping[str, Any]) -> list[str]:
    """Return the verdict, then a sentence for each result."""
    found = [
        verdict(receipt),
        _chosen(receipt),
        *_metric(receipt),
        *_file(receipt),
        *_energy(receipt["energy"]),
        *(f"{_where(row)}: {row['backend']} is the fastest form. {_compared(row)}." for row in fastest(receipt)),
        *busy(receipt["latency"]),
    ]
    if "quantization" in receipt["structure"]:
        found += _integers_beside_bf16(receipt["latency"])
    if receipt["size"]["sparsity"] >= NOTHING:
        found.append(_zeros(receipt))
    kinds = set(receipt["compression"].values())
    if kinds == {"distillation"}:
        found.append("Distillation changes only weights: size and time are those of the configured net.")
    if not kinds:
        found.append("No compression is configured: this is the receipt of a net as it was trained.")
    return found


def verdict(receipt: Mapping[str, Any]) -> str:
    """Return one sentence on the fastest form at the smallest batch and on the file that ships."""
    row, file = next(iter(fastest(receipt)), None), shipped(receipt["files"])
    parts = [] if row is None else [f"{row['backend']} at batch {row['batch']} is {_compared(row, 'eager', 'twin')}"]
    if file is not None and file["ratio"] is not None:
        parts.append(f"the {file['target']} file is {resized(file['ratio'])}")
    return f"Verdict: {'; '.join(parts) or 'nothing could be compared'}."


def fastest(receipt: Mapping[str, Any]) -> list[Row]:
    """Return the fastest form of this net in each cell, in the order of measurement."""
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in receipt["latency"]:
        if row["of"] == "this":
            cells.setdefault((row["device"], row["batch"], row["threads"]), []).append(row)
    return [min(some, key=lambda row: float(row["median_ms"])) for some in cells.values()]


def twin_of(backend: str) -> str:
    """Describe the dense net in the runtime of `backend`."""
    runtime = FLOAT_TWIN.get(backend, backend)
    return TWINS.get(backend) or TWINS.get(runtime) or f"the dense net in {runtime}"


def sped(row: Row, key: str) -> str:
    """Describe a row's time relative to form `key`: 2.6x faster, 1.9x slower, equal; empty without it."""
    word = told_verdict(row, key)
    if word in ("faster", "slower"):
        return f"{_times(row[f'over_{key}'])} {word}"
    return {"same": "equal", UNCLEAR: "equal within noise"}.get(word, "")


def resized(ratio: float) -> str:
    """Describe a ratio of sizes: 3.5x smaller, 1.2x larger, the same size."""
    if abs(ratio - 1) <= MARGIN:
        return "the same size"
    return f"{_times(ratio)} {'smaller' if ratio < 1 else 'larger'}"


def _times(ratio: float) -> str:
    factor = max(ratio, 1 / ratio) if ratio else float("inf")
    return f"{factor:.1f}x" if factor >= 1.1 else f"{factor:.2f}x"


def _compared(row: Row, *keys: str) -> str:
    names = {**REFERENCES, "twin": twin_of(row["backend"])}
    if row["backend"] == "eager":  # its twin is also eager
        names.pop("twin")
    texts = []
    for key in keys or names:
        factor = sped(row, key) if key in names else ""
        if factor.startswith("equal"):
            texts.append(f"as fast as {names[key]}{factor.removeprefix('equal')}")
        elif factor:
            texts.append(f"{factor} than {names[key]}")
    return ", ".join(texts) or "not compared"


def _chosen(receipt: Mapping[str, Any]) -> str:
    chosen, split = receipt["chosen"], receipt["split"]
    own = next((row for row in receipt["figures"] if row["of"] == "this" and row["split"] == "val"), None)
    value = own["figures"].get(chosen["by"].rpartition("/")[2]) if own else None
    shown = "" if value is None else f" ({value:.4f})"
    kept = "The test split had no part in the choice" if split == "test" else "test=false keeps the test split unseen"
    return f"Measured: best.ckpt of step {chosen['step']}, chosen by {chosen['by']}{shown}. {kept}."


def _metric(receipt: Mapping[str, Any]) -> list[str]:
    split, metric = receipt["split"], receipt["metric"]
    rows = {(row["of"], row["backend"]): row for row in receipt["figures"] if row["split"] == split}
    own, dense = rows.get(("this", "eager")), rows.get(("dense", "eager"))
    if own is None:
        return []
    text = f"{split}/{metric}: {own['figures'][metric]:.4f}"
    if dense is None:
        return [f"{text}. For the metrics of a trained dense net add baseline=<run directory>."]
    agreement = own["agreement"]
    equal = (
        f"Outputs differ by {agreement['largest']:.3g} at most"
        if agreement["share"] is None
        else f"{agreement['share']:.4f} of {agreement['n']} predictions are equal"
    )
    return [f"{text}; dense net: {dense['figures'][metric]:.4f}. {equal}."]


def _energy(energy: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    for name, of in (("energy_gpu_j", "GPUs"), ("energy_cpu_j", "processors")):
        joules, dense = energy["this"].get(name), energy["dense"].get(name)
        if joules is not None:
            other = "" if dense is None else f"; dense net: {dense / 3600:.3g} Wh"
            yield f"Training took {joules / 3600:.3g} Wh of the {of}{other}."


def _file(receipt: Mapping[str, Any]) -> list[str]:
    row = shipped(receipt["files"])
    if row is None:
        return ["No file could be exported. See what was not measured."]
    text = f"File {row['target']}: {row['bytes']:,} bytes, {row['gzipped']:,} gzipped"
    if row["ratio"] is not None:
        text += f"; compared with the dense file {resized(row['ratio'])}, gzipped {resized(row['gzipped_ratio'])}"
    found = [f"{text}."]
    packed = next((other for other in receipt["files"] if (other["of"], other["target"]) == ("this", "weights")), row)
    if packed["bytes"] < PACKED * row["bytes"]:
        found.append(
            f"File weights (for torch, packed bits): {packed['bytes']:,} bytes, {packed['gzipped']:,} gzipped. "
            f"{row['target']} stores at least a byte for each weight."
        )
    if receipt.get("undeclared"):
        return [*found, f"It can't be exported: the data declare {receipt['undeclared']}."]
    return [*found, f"Export it with python scripts/export.py run=<run directory> target={row['target']}."]


def shipped(files: Iterable[Row]) -> Row | None:
    """Return the row of the file that ships."""
    own = {row["target"]: row for row in files if row["of"] == "this"}
    return next((own[target] for target in SHIPS if target in own), None)


def busy(
    rows: Iterable[Row], of: str = "dense", again: str = "python scripts/receipt.py run=<run directory>"
) -> list[str]:
    """Return a warning if eager calls of net `of` vary too much; `again` is the command to repeat."""
    wide = max(
        (row["p90_ms"] / row["p10_ms"] for row in rows if (row["of"], row["backend"]) == (of, "eager")), default=1.0
    )
    if wide < WIDE:
        return []
    return [f"The machine was busy: equal calls differ by a factor of {wide:.1f}. When it is idle, run {again}."]


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
            found.append(
                f"{_where(row)}: {row['backend']} is {_compared(row, 'bf16')}, which needs no quantization. Here int8 "
                "saves bytes, not time."
            )
    return found


def _zeros(receipt: Mapping[str, Any]) -> str:
    """Describe the effect of zeros, which save bytes of a gzipped file, but no time."""
    file = shipped(receipt["files"])
    text = f"{receipt['size']['sparsity']:.1%} of the layers' weights are zero, which saves no time by itself"
    if file is not None and file["gzipped_ratio"] is not None:
        text += f"; gzipped, the file is {resized(file['gzipped_ratio'])}"
    return text + ". Removed channels save time (compression=prune_channels)."


def method(receipt: Mapping[str, Any], warmup: int) -> list[str]:
    """Describe how the metrics were measured, and the criteria of a verdict."""
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
