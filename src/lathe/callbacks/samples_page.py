"""The page of single predictions: one HTML file that needs nothing beside it, and its numbers as JSON."""

import base64
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from lathe.files import write_atomically
from lathe.measure.plot import lines

SIDE = 96  # pixels of a shown image at least: small ones are enlarged whole times, without smoothing
MATRIX = 30  # classes up to which the whole matrix is shown
PAIRS = 30  # confusions that are listed, the most frequent first
STYLE = (
    "body{font:14px/1.4 system-ui,sans-serif;margin:2em;max-width:75em}figure{display:inline-block;margin:.4em;"
    "width:9.5em;vertical-align:top}img{image-rendering:pixelated;display:block;max-width:100%}figcaption{font-size:12px;overflow-wrap:anywhere}"
    "table{border-collapse:collapse;margin:.6em 0}td,th{border:1px solid #ccc;padding:.15em .5em;text-align:right}"
    "th{font-weight:600}.wrong{color:#b00020}"
)


class Shown(NamedTuple):
    """A sample that is shown. `number` counts the split's samples from 0, None where nobody knows; `pixels` are float32
    [channels, height, width] as the net gets them; `file` is what people call it, None where it has no name."""

    number: int | None
    label: int
    predicted: int
    probability: float
    loss: float
    pixels: Tensor | None
    file: str | None = None


@dataclass(frozen=True)
class Gathered:
    """What all processes have seen: `confusion` int64 [class, predicted], `calibration` float64 [3, bins] of samples,
    sums of probabilities and right predictions; `note`: what a reader should know of the rest."""

    split: str
    confusion: Tensor
    calibration: Tensor
    worst: Sequence[Shown]
    random: Sequence[Shown]
    names: Sequence[str]
    mean: Sequence[float] | None
    std: Sequence[float] | None
    note: str = ""


def calibration_error(calibration: Tensor) -> float:
    """The expected calibration error: sum over bins of |right - probabilities| / samples."""
    return float((calibration[2] - calibration[1]).abs().sum() / calibration[0].sum())


def write_page(folder: Path, gathered: Gathered) -> Path:
    """Writes <split>.json and <split>.html into `folder`, and returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{gathered.split}.json", json.dumps(_numbers(gathered), indent=1) + "\n")
    page = folder / f"{gathered.split}.html"
    write_atomically(page, _html(gathered))
    return page


def _numbers(gathered: Gathered) -> dict[str, Any]:
    count, probability, right = gathered.calibration.tolist()

    def shown(samples: Sequence[Shown]) -> list[dict[str, Any]]:
        rows = [{name: value for name, value in s._asdict().items() if name != "pixels"} for s in samples]
        return [row | {"loss": row["loss"] if math.isfinite(row["loss"]) else None} for row in rows]  # JSON has no word

    return {
        "split": gathered.split,
        "samples": int(gathered.confusion.sum()),
        "accuracy": int(gathered.confusion.trace()) / int(gathered.confusion.sum()),
        "calibration_error": calibration_error(gathered.calibration),
        "calibration": [
            {"samples": int(n), "probability": p / n, "accuracy": r / n}
            for n, p, r in zip(count, probability, right, strict=True)
            if n
        ],
        "classes": list(gathered.names),
        "confusion": gathered.confusion.tolist(),
        "worst": shown(gathered.worst),
        "random": shown(gathered.random),
    }


def _html(gathered: Gathered) -> str:
    numbers = _numbers(gathered)
    points = [(row["probability"], row["accuracy"]) for row in numbers["calibration"]]
    plot = lines("calibration", "probability", "accuracy", {gathered.split: points}, diagonal=True)
    parts = [
        f"<h1>{gathered.split}: {numbers['samples']:,} samples</h1>",
        f"<p>accuracy {numbers['accuracy']:.4f}, expected calibration error {numbers['calibration_error']:.4f}</p>",
        f"<p>{escape(gathered.note)}</p>" if gathered.note else "",
        "<h2>Largest loss</h2>",
        *(_figure(sample, gathered) for sample in gathered.worst),
        "<h2>At random</h2>",
        *(_figure(sample, gathered) for sample in gathered.random),
        "<h2>Confusion</h2>",
        _pairs(gathered),
        _matrix(gathered) if len(gathered.names) <= MATRIX else "",
        "<h2>Calibration</h2>",
        plot,
    ]
    title = f"{gathered.split} samples"
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f"{head}</head><body>{''.join(parts)}</body></html>\n"


def _figure(sample: Shown, gathered: Gathered) -> str:
    name = escape(gathered.names[sample.label])
    found = escape(gathered.names[sample.predicted])
    image = "" if sample.pixels is None else f'<img alt="{name}" src="data:image/png;base64,{_png(sample, gathered)}">'
    verdict = "" if sample.label == sample.predicted else ' class="wrong"'
    number = "" if sample.number is None else f"#{sample.number} "
    file = "" if sample.file is None else f"{escape(sample.file)}<br>"
    told = f"{file}{number}{name}<br><span{verdict}>{found} {sample.probability:.1%}</span><br>loss {sample.loss:.3g}"
    return f"<figure>{image}<figcaption>{told}</figcaption></figure>"


def _png(sample: Shown, gathered: Gathered) -> str:
    assert sample.pixels is not None
    pixels = sample.pixels
    if gathered.mean is not None and gathered.std is not None and len(gathered.mean) == len(pixels):
        mean, std = torch.tensor(gathered.mean), torch.tensor(gathered.std)
        pixels = pixels * std[:, None, None] + mean[:, None, None]
    else:  # a data set that says nothing of its scale: from its darkest to its brightest
        pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp(min=1e-12)
    array = (pixels.nan_to_num().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    image = Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
    times = max(1, -(-SIDE // max(image.size)))
    buffer = io.BytesIO()
    image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def _pairs(gathered: Gathered) -> str:
    """The most frequent confusions."""
    wrong = gathered.confusion.clone().fill_diagonal_(0)
    values, places = wrong.flatten().topk(min(PAIRS, wrong.numel()))
    names, of = [escape(name) for name in gathered.names], gathered.confusion.sum(dim=1)
    rows = [
        f"<tr><td>{names[label]}</td><td>{names[found]}</td><td>{n:,}</td><td>{n / int(of[label]):.1%}</td></tr>"
        for n, (label, found) in zip(values.tolist(), (divmod(p, len(names)) for p in places.tolist()), strict=True)
        if n
    ]
    if not rows:
        return "<p>None.</p>"
    return (
        f"<table><tr><th>class</th><th>predicted</th><th>samples</th><th>of the class</th></tr>{''.join(rows)}</table>"
    )


def _matrix(gathered: Gathered) -> str:
    """Rows are classes, columns what was predicted; darker is a larger share of the class."""
    names = [escape(name) for name in gathered.names]
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = []
    for name, row in zip(names, gathered.confusion.tolist(), strict=True):
        total = max(sum(row), 1)
        cells = "".join(f'<td style="background:rgba(0,114,178,{n / total:.2f})">{n or ""}</td>' for n in row)
        rows.append(f"<tr><th>{name}</th>{cells}</tr>")
    return f"<table><tr><th>class \\ predicted</th>{head}</tr>{''.join(rows)}</table>"
