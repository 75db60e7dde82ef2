"""Compare an exported file, run in a fresh process, with the module, on held-out and odd inputs."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from lathe.data.order import IGNORE
from lathe.errors import UserError, require
from lathe.files import disk_reason, scratch
from lathe.measure import AgreementMeter
from lathe.runs.export_model import ExportModel, make_preprocess

LOGITS = 2**25  # at most, of the held-out data (128 MiB): a limit for large vocabularies
BYTES = 2**26  # at most, of one batch: images of another size may be large
INPUTS = 2**30  # bytes of all held-out inputs, at most: they are in memory and in the temporary folder
BATCHES = (1, 2, 3, 7, 16, 33)  # batch sizes, in addition to that of the data
STEP = 1e-3  # of a pixel: division by 255 and std in float32 may differ so much from multiplication by the inverse
SECONDS = 600  # timeout of the fresh process


@dataclass(frozen=True)
class Held:
    """Held-out batches of the data module, and their inputs as clients send them."""

    batches: list[Any]
    inputs: list[Tensor]

    @property
    def n(self) -> int:
        return sum(len(x) for x in self.inputs)


def held_out(ready: ExportModel, split: str, samples: int | None) -> Held:
    """Return the first `samples` of a split, or as many as `LOGITS` and `INPUTS` allow.

    Padding rows are left out, and images are scaled to the input size of the file.
    """
    held = Held([], [])
    size, logits, inputs = ready.other_size, 0, 0
    for batch in ready.data.eval_loader(split):
        for part in _pieces(_counted(batch), most_of(ready)):
            part = (
                tuple(item[: samples - held.n] if _rows(item) else item for item in part)
                if samples is not None
                else part
            )
            if not len(part[0]):
                continue
            x = ready.inputs_of(part[0])
            if x.dtype == torch.uint8:
                own = make_preprocess(ready.cfg)
                off = (own(x) - part[0]).abs()
                require(
                    bool((off <= STEP * own.scale).all()),
                    f"target.preprocess=true: the data differ by {off.max():.2g} from (pixel / 255 - data.mean) / "
                    "data.std. Set target.preprocess=false.",
                )
                if size is not None:
                    x = inside(x, size)
            held.batches.append(part)
            held.inputs.append(x)
            logits += ready.logits_of(x)
            inputs += x.nbytes
            if held.n == samples or logits > LOGITS or inputs > INPUTS:
                return held
    return held


def inside(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Return images of `size` with `x`, scaled, in the centre that `Preprocess` crops; borders repeat."""
    ratio = min(side / own for side, own in zip(size, x.shape[2:], strict=True))
    tall, wide = (min(side, max(1, round(own * ratio))) for side, own in zip(size, x.shape[2:], strict=True))
    top, left = (size[0] - tall) // 2, (size[1] - wide) // 2
    middle = interpolate(x.float(), size=(tall, wide), mode="bilinear", antialias=True).round().clamp(0, 255)
    return pad(middle, (left, size[1] - wide - left, top, size[0] - tall - top), mode="replicate").to(torch.uint8)


def _rows(item: Any) -> bool:
    return torch.is_tensor(item) and item.dim() > 0


def _counted(batch: Any) -> tuple[Any, ...]:
    """Return the batch without rows whose targets are ignored."""
    batch = tuple(batch)
    if len(batch) < 2 or not _rows(batch[1]) or batch[1].is_floating_point() or len(batch[1]) != len(batch[0]):
        return batch
    counts = (batch[1] != IGNORE).flatten(1).any(1) if batch[1].dim() > 1 else batch[1] != IGNORE
    return batch if counts.all() else tuple(item[counts] if _rows(item) else item for item in batch)


def _pieces(batch: tuple[Any, ...], most: int) -> list[tuple[Any, ...]]:
    starts = range(0, len(batch[0]), most)
    return [tuple(item[start : start + most] if _rows(item) else item for item in batch) for start in starts]


def most_of(ready: ExportModel) -> int:
    """Return the largest number of rows of a batch."""
    return max(1, BYTES // ready.example[:1].numel())


def odd_inputs(ready: ExportModel) -> list[Tensor]:
    """Return noise and extreme values in batch sizes that were not traced, and in other lengths or sizes."""
    draw = torch.Generator().manual_seed(0)
    shape = ready.example.shape[1:]
    found = []
    for number, batch in enumerate(size for size in BATCHES if size <= max(2, most_of(ready))):
        if ready.example.dtype == torch.uint8:
            sides = list(shape[1:])
            if ready.takes_any_size:
                sides = torch.randint(1, 4 * max(sides) + 1, (2,), generator=draw).tolist() if number else [1, 1]
            found.append(torch.randint(0, 256, (batch, shape[0], *sides), generator=draw, dtype=torch.uint8))
            if number < 2:
                found.append(torch.full((batch, *shape), 255 * number, dtype=torch.uint8))
        elif ready.example.is_floating_point():
            found.append(torch.randn(batch, *shape, generator=draw))
        else:
            time = shape[0]
            if ready.facts["input"]["shape"][1] == "time":
                time = int(torch.randint(1, time + 1, (), generator=draw)) if number else 1
            found.append(torch.randint(0, ready.facts["input"]["vocab_size"], (batch, time), generator=draw))
    return found


@dataclass(frozen=True)
class Difference:
    """The largest difference of two sets of logits, and the largest logit of the reference (`scale`).

    `agreement` is the share of equal predictions among `n`, None for values.
    """

    largest: float
    scale: float
    agreement: float | None
    n: int

    @property
    def relative(self) -> float:
        return self.largest / self.scale if self.scale else self.largest


@torch.no_grad()
def answers_of(ready: ExportModel, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the module's outputs; raise UserError for nan or inf."""
    found = []
    for x in inputs:
        answer = ready.net(x).float()
        if not answer.isfinite().all():
            raise UserError(f"the run's own net answers an input of shape {list(x.shape)} with nan or inf")
        found.append(answer)
    return found


def differences(
    inputs: Sequence[Tensor], answers: Sequence[Tensor], references: Sequence[Tensor], predicts: str = "classes"
) -> Difference:
    """Compare a file's outputs with the module's, `references`; a nan makes the difference nan.

    Raises UserError if an output has another shape.
    """
    meter, scale = AgreementMeter(predicts), 0.0
    for x, answer, reference in zip(inputs, answers, references, strict=True):
        if answer.shape != reference.shape:
            raise UserError(
                f"an input of shape {list(x.shape)} is answered with {list(answer.shape)} instead of "
                f"{list(reference.shape)}"
            )
        meter.add(answer, reference)
        scale = max(scale, float(reference.abs().max()))
    found = meter.result
    return Difference(found.largest, scale, found.share, found.n)


def answered(command: Sequence[str], job: dict[str, Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs of a fresh process, `python -m <command>`; raise UserError if it fails."""
    try:
        with scratch() as folder:
            (folder / "job.json").write_text(json.dumps(job))
            for number, x in enumerate(inputs):
                np.save(folder / f"in_{number}.npy", x.numpy())
            _run([sys.executable, "-m", *command, str(folder)])
            return [torch.from_numpy(np.load(folder / f"out_{number}.npy")).float() for number in range(len(inputs))]
    except OSError as error:
        reason = disk_reason(error)
        if reason is None:
            raise
        raise UserError(
            f"the folder for temporary files, {tempfile.gettempdir()}, can't be used ({reason}; TMPDIR names another)"
        ) from error


def _run(words: list[str]) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)  # our own modules  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise UserError(f"a fresh process did not answer within {SECONDS} seconds") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise UserError(f"a fresh process could not run the file ({lines[-1][:300].rstrip('.')})")
