"""The prediction report as HTML and JSON."""

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
from lathe.html_page import figure, page, section, table
from lathe.measure.plot import lines

SIDE = 96  # minimum side of a shown image in pixels: small ones are enlarged by whole factors, without smoothing
MATRIX = 30  # largest number of classes with a full matrix
PAIRS = 30  # listed confusions, the most frequent first


class Shown(NamedTuple):
    """A shown sample; `pixels` are float32 [channels, height, width] as the net gets them.

    `number` counts the split's samples from 0; `file` is its file or item. None if unknown.
    """

    number: int | None
    label: int
    predicted: int
    probability: float
    loss: float
    pixels: Tensor | None
    file: str | None = None


@dataclass(frozen=True)
class Gathered:
    """Numbers of all ranks: `confusion` int64 [class, predicted], `calibration` float64 [3, bins].

    The rows of `calibration` are samples, sums of probabilities and correct predictions.
    """

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
    """Return the expected calibration error: sum over bins of |correct - probabilities| / samples."""
    return float((calibration[2] - calibration[1]).abs().sum() / calibration[0].sum())


def write_page(folder: Path, gathered: Gathered) -> Path:
    """Write <split>.json and <split>.html into `folder`; return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{gathered.split}.json", json.dumps(_numbers(gathered), indent=1) + "\n")
    page = folder / f"{gathered.split}.html"
    write_atomically(page, _html(gathered))
    return page


def _numbers(gathered: Gathered) -> dict[str, Any]:
    count, probability, right = gathered.calibration.tolist()

    def shown(samples: Sequence[Shown]) -> list[dict[str, Any]]:
        rows = [{name: value for name, value in s._asdict().items() if name != "pixels"} for s in samples]
        return [row | {"loss": row["loss"] if math.isfinite(row["loss"]) else None} for row in rows]  # JSON has no inf

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
    numbers, split = _numbers(gathered), gathered.split
    points = [(row["probability"], row["accuracy"]) for row in numbers["calibration"]]
    plot = lines("Calibration", "probability of the predicted class", "accuracy", {split: points}, diagonal=(0.0, 1.0))
    error = f"{numbers['calibration_error']:.4f}"
    confused = [_pairs(gathered), _matrix(gathered) if len(gathered.names) <= MATRIX else ""]
    sections = [
        section(
            "Largest loss",
            f"The {len(gathered.worst)} samples of the largest loss.",
            _gallery(gathered.worst, gathered),
        ),
        section("At random", f"{len(gathered.random)} samples, drawn at random.", _gallery(gathered.random, gathered)),
        section(
            "Confusion",
            "Classes that were predicted in place of others.",
            f'<div class="row">{"".join(confused)}</div>',
        ),
        section(
            "Calibration",
            f"Expected calibration error {error}.",
            figure(plot, "Accuracy of the samples in each bin of probability. On the dashed line, both are equal."),
        ),
    ]
    facts = [
        f"{numbers['samples']:,} samples",
        f"accuracy {numbers['accuracy']:.4f}",
        f"expected calibration error {error}",
        "weights of best.ckpt",
    ]
    return page(f"Predictions on {split}", facts, [gathered.note] if gathered.note else [], sections)


def _gallery(samples: Sequence[Shown], gathered: Gathered) -> str:
    return f'<div class="samples">{"".join(_figure(sample, gathered) for sample in samples)}</div>'


def _figure(sample: Shown, gathered: Gathered) -> str:
    name, found = gathered.names[sample.label], gathered.names[sample.predicted]
    image = ""
    if sample.pixels is not None:
        image = f'<img alt="{escape(name)}" src="data:image/png;base64,{_png(sample, gathered)}">'
    verdict = "" if sample.label == sample.predicted else ' class="wrong"'
    rows = [("true", name, ""), ("predicted", f"{found}, {sample.probability:.1%}", verdict)]
    rows.append(("loss", f"{sample.loss:.3g}", ""))
    if sample.number is not None:
        rows.append(("sample", str(sample.number), ""))
    listed = "".join(f"<dt>{key}</dt><dd{kind}>{escape(value)}</dd>" for key, value, kind in rows)
    file = "" if sample.file is None else f"<b>{escape(sample.file)}</b>"
    return f'<figure class="card">{image}<figcaption>{file}<dl>{listed}</dl></figcaption></figure>'


def _png(sample: Shown, gathered: Gathered) -> str:
    assert sample.pixels is not None
    pixels = sample.pixels
    if gathered.mean is not None and gathered.std is not None and len(gathered.mean) == len(pixels):
        mean, std = torch.tensor(gathered.mean), torch.tensor(gathered.std)
        pixels = pixels * std[:, None, None] + mean[:, None, None]
    else:  # the data have no mean and std: scale from the darkest to the brightest pixel
        pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp(min=1e-12)
    array = (pixels.nan_to_num().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    image = Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
    times = max(1, -(-SIDE // max(image.size)))
    buffer = io.BytesIO()
    image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def _pairs(gathered: Gathered) -> str:
    """Return a table of the most frequent confusions."""
    wrong = gathered.confusion.clone().fill_diagonal_(0)
    values, places = wrong.flatten().topk(min(PAIRS, wrong.numel()))
    names, of = gathered.names, gathered.confusion.sum(dim=1)
    rows = [
        (names[label], names[found], f"{n:,}", f"{n / int(of[label]):.1%}")
        for n, (label, found) in zip(values.tolist(), (divmod(p, len(names)) for p in places.tolist()), strict=True)
        if n
    ]
    if not rows:
        return '<p class="says">None.</p>'
    return table(("true", "predicted", "samples", "of the class"), rows, texts=2)


def _matrix(gathered: Gathered) -> str:
    """Return the confusion matrix, colored by shares of the class."""
    names = [escape(name) for name in gathered.names]
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = []
    for label, (name, row) in enumerate(zip(names, gathered.confusion.tolist(), strict=True)):
        total = max(sum(row), 1)
        cells = ""
        for predicted, n in enumerate(row):
            colour, share = "accent" if predicted == label else "bad", 60 * n / total
            style = f' style="background: color-mix(in srgb, var(--{colour}) {share:.0f}%, transparent)"' if n else ""
            cells += f"<td{style}>{n or ''}</td>"
        rows.append(f"<tr><th>{name}</th>{cells}</tr>")
    top = f"<thead><tr><th>true \\ predicted</th>{head}</tr></thead>"
    long = " long" if max(map(len, gathered.names)) > 3 else ""  # rotates the column names
    drawn = f'<table class="matrix{long}">{top}<tbody>{"".join(rows)}</tbody></table>'
    return figure(
        drawn, "Samples by class (row) and prediction (column). The stronger the colour, the larger the share."
    )
