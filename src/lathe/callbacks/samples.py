"""Report of predictions: worst and random samples, confusion matrix and calibration."""

import base64
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from lathe.config.types import Count, NonNegativeInt
from lathe.config.validation import validated
from lathe.data.order import IGNORE
from lathe.errors import require
from lathe.files import write_atomically
from lathe.html_page import figure, page, section, table
from lathe.measure.plot import lines
from lathe.measure.processes import everyones

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


def write_page(folder: Path, gathered: Gathered) -> Path:
    """Write <split>.json and <split>.html into `folder`; return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{gathered.split}.json", json.dumps(_numbers(gathered), indent=1) + "\n")
    page = folder / f"{gathered.split}.html"
    write_atomically(page, _html(gathered))
    return page


def _numbers(gathered: Gathered) -> dict[str, Any]:
    bins = gathered.calibration
    count, probability, right = bins.tolist()

    def shown(samples: Sequence[Shown]) -> list[dict[str, Any]]:
        rows = [{name: value for name, value in s._asdict().items() if name != "pixels"} for s in samples]
        return [row | {"loss": row["loss"] if math.isfinite(row["loss"]) else None} for row in rows]  # JSON has no inf

    return {
        "split": gathered.split,
        "samples": int(gathered.confusion.sum()),
        "accuracy": int(gathered.confusion.trace()) / int(gathered.confusion.sum()),
        "calibration_error": float((bins[2] - bins[1]).abs().sum() / bins[0].sum()),
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
    worst, random = len(gathered.worst), len(gathered.random)
    calibrated = figure(plot, "Accuracy of the samples in each bin of probability. On the dashed line, both are equal.")
    sections = [
        section("Largest loss", f"The {worst} samples of the largest loss.", _gallery(gathered.worst, gathered)),
        section("At random", f"{random} samples, drawn at random.", _gallery(gathered.random, gathered)),
        section("Confusion", "Classes predicted in place of others.", f'<div class="row">{"".join(confused)}</div>'),
        section("Calibration", f"Expected calibration error {error}.", calibrated),
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
    name, predicted = gathered.names[sample.label], gathered.names[sample.predicted]
    image = ""
    if sample.pixels is not None:
        image = f'<img alt="{escape(name)}" src="data:image/png;base64,{_png(sample, gathered)}">'
    verdict = "" if sample.label == sample.predicted else ' class="wrong"'
    rows = [("true", name, ""), ("predicted", f"{predicted}, {sample.probability:.1%}", verdict)]
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
    values, positions = wrong.flatten().topk(min(PAIRS, wrong.numel()))
    names, of = gathered.names, gathered.confusion.sum(dim=1)
    rows = [
        (names[label], names[predicted], f"{n:,}", f"{n / int(of[label]):.1%}")
        for n, (label, predicted) in zip(
            values.tolist(), (divmod(p, len(names)) for p in positions.tolist()), strict=True
        )
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


FOLDER = "samples"  # in the run directory
STATES = {"val": "validate", "test": "test"}  # of the trainer, by split
UNNAMED = (
    "Samples have no numbers and no names of files here: several processes have shared them out, and one knows them."
)


class Samples(Callback):
    """Write samples/<split>.html and .json to the run directory, with the weights of best.ckpt.

    The page has the samples of the largest cross-entropy and random ones, with image, class, predicted class and its
    probability; the confusion matrix; and accuracy by predicted probability in bins of equal width, with the expected
    calibration error, the mean difference of the two weighted by samples (Guo et al. 2017, arXiv:1706.04599). Numbers
    are over all ranks.

    Args:
        split: "val" runs one more validation at the end; "test" uses the run's test.
        worst, random: number of samples.
        bins: of the probability of the predicted class.
    """

    acts_in_final_test = True

    @validated
    def __init__(
        self,
        split: Literal["val", "test"] = "val",
        worst: NonNegativeInt = 24,
        random: NonNegativeInt = 24,
        bins: Count = 15,
    ) -> None:
        self.split, self.worst, self.random, self.bins = split, worst, random, bins
        self.page: Path | None = None  # on rank 0, once written
        self.needs_final_validation = split == "val"
        self._forget()

    def _forget(self) -> None:
        self._seen = 0
        self._worst: list[tuple[float, Shown]] = []  # with their priorities; the largest ones are kept
        self._random: list[tuple[float, Shown]] = []
        self._confusion: Tensor | None = None
        self._calibration = torch.zeros(3, self.bins, dtype=torch.float64)  # samples, probabilities, correct ones
        self._draws = torch.Generator()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        predicts = getattr(pl_module, "predicts", None)
        require(
            predicts == "classes" and hasattr(pl_module, "observers"),
            f"callbacks.samples shows predictions of classes, and {type(pl_module).__name__} predicts "
            f"{predicts or 'something else'}: leave samples out of callbacks.",
        )

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.state.fn == STATES[self.split]:  # not during training
            self._forget()
            self._draws.manual_seed(trainer.global_rank + 1)
            pl_module.observers.append(self._look)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.state.fn == STATES[self.split]:
            self._end(trainer, pl_module)

    on_test_start, on_test_end = on_validation_start, on_validation_end

    @torch.no_grad()
    def _look(self, split: str, outputs: Any, batch: Any) -> None:
        """Add a batch: logits [batch, classes] and (x, y) with class numbers or probabilities y."""
        x, y = batch[0], batch[1]
        require(
            isinstance(outputs, Tensor) and outputs.dim() == 2 and len(outputs) == len(y),
            "callbacks.samples takes a row of logits for each sample, and this net gives something else: leave samples "
            "out of callbacks.",
        )
        labels = (y.argmax(dim=1) if y.is_floating_point() else y).cpu()
        logits = outputs.float().cpu()
        rows = (labels != IGNORE).nonzero().flatten()
        labels, logits = labels[rows], logits[rows]
        if not len(rows):
            return
        probability, predicted = logits.softmax(dim=1).nan_to_num().max(dim=1)
        losses = F.cross_entropy(logits, labels, reduction="none").nan_to_num(nan=torch.inf)
        classes = logits.shape[1]
        if self._confusion is None:
            self._confusion = torch.zeros(classes, classes, dtype=torch.int64)
        self._confusion += torch.bincount(labels * classes + predicted, minlength=classes**2).view(classes, classes)
        bins = (probability * self.bins).long().clamp(max=self.bins - 1)
        ones = torch.ones_like(probability)
        for row, values in enumerate((ones, probability, (predicted == labels).float())):
            self._calibration[row].index_add_(0, bins, values.double())
        lots = torch.rand(len(rows), generator=self._draws)
        for top, count, priorities in ((self._worst, self.worst, losses), (self._random, self.random, lots)):
            best = priorities.topk(min(count, len(rows)))
            for priority, i in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                if len(top) < count or priority > top[-1][0]:
                    numbers = int(labels[i]), int(predicted[i]), float(probability[i]), float(losses[i])
                    top.append((priority, Shown(self._seen + i, *numbers, _pixels(x[rows[i]]))))
                    top.sort(key=lambda item: -item[0])
                    del top[count:]
        self._seen += len(rows)

    def _end(self, trainer: Trainer, pl_module: Any) -> None:
        if self._look in pl_module.observers:
            pl_module.observers.remove(self._look)
        each = everyones((self._seen, self._worst, self._random, self._confusion, self._calibration))
        if not trainer.is_global_zero:
            return
        matrices = [confusion for *_, confusion, _ in each if confusion is not None]
        if not matrices:
            rank_zero_warn(f"callbacks.samples: {self.split} had no samples, so there is no page of them.")
            return

        datamodule: Any = getattr(trainer, "datamodule", None)
        name_of = getattr(datamodule, "name_of", lambda split, number: None)

        def most(index: int, count: int) -> list[Shown]:
            ranked = sorted((entry for part in each for entry in part[index]), key=lambda entry: -entry[0])[:count]
            if len(each) > 1:  # only a single process, which reads all samples, knows their numbers
                return [shown._replace(number=None) for _, shown in ranked]
            return [shown._replace(file=name_of(self.split, shown.number)) for _, shown in ranked]

        names = getattr(datamodule, "class_names", None)
        gathered = Gathered(
            split=self.split,
            confusion=sum(matrices[1:], matrices[0]),
            calibration=sum((part[4] for part in each[1:]), each[0][4]),
            worst=most(1, self.worst),
            random=most(2, self.random),
            names=[str(i) for i in range(len(matrices[0]))] if names is None else [str(name) for name in names],
            mean=getattr(datamodule, "mean", None),
            std=getattr(datamodule, "std", None),
            note=UNNAMED if len(each) > 1 else "",
        )
        self.page = write_page(Path(trainer.default_root_dir) / FOLDER, gathered)
        self._forget()


def _pixels(x: Any) -> Tensor | None:
    """Return an image [channels, height, width] in float32 on the CPU; None if `x` is not an image."""
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[0] not in (1, 3):
        return None
    return x.detach().float().cpu().clone()
