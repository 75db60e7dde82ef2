"""Report of predictions: worst and random samples, confusion matrix and calibration."""

from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import functional as F

from lathe.callbacks.samples_page import Gathered, Shown, write_page
from lathe.config.types import Count, NonNegativeInt
from lathe.config.validation import validated
from lathe.data.order import IGNORE
from lathe.errors import require
from lathe.measure.processes import everyones

FOLDER = "samples"  # in the run directory
UNNAMED = (
    "Samples have no numbers and no names of files here: several processes have shared them out, and one knows them."
)


class _Kept(NamedTuple):
    """A sample with its priority; the largest priorities are kept."""

    priority: float
    sample: Shown


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
        self._seen, self._worst, self._random = 0, list[_Kept](), list[_Kept]()
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

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.split == "val" and trainer.state.fn == "validate":
            self._begin(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.split == "test":
            self._begin(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.split == "val" and trainer.state.fn == "validate":
            self._end(trainer, pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.split == "test":
            self._end(trainer, pl_module)

    def _begin(self, trainer: Trainer, pl_module: Any) -> None:
        self._forget()
        self._draws.manual_seed(trainer.global_rank + 1)
        pl_module.observers.append(self._look)

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
        at = (probability * self.bins).long().clamp(max=self.bins - 1)
        ones = torch.ones_like(probability)
        for row, values in enumerate((ones, probability, (predicted == labels).float())):
            self._calibration[row].index_add_(0, at, values.double())
        lots = torch.rand(len(rows), generator=self._draws)
        for kept, count, priorities in ((self._worst, self.worst, losses), (self._random, self.random, lots)):
            best = priorities.topk(min(count, len(rows)))
            for priority, i in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                if len(kept) < count or priority > kept[-1].priority:
                    shown = Shown(
                        self._seen + i,
                        int(labels[i]),
                        int(predicted[i]),
                        float(probability[i]),
                        float(losses[i]),
                        _pixels(x[rows[i]]),
                    )
                    kept.append(_Kept(priority, shown))
                    kept.sort(key=lambda item: -item.priority)
                    del kept[count:]
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

        def most(place: int, count: int) -> list[Shown]:
            every = [(rank, kept) for rank, found in enumerate(each) for kept in found[place]]
            every.sort(key=lambda item: (-item[1].priority, item[0]))
            # only a single process, which reads all samples, knows their numbers
            if len(each) > 1:
                return [kept.sample._replace(number=None) for _, kept in every[:count]]
            found = [kept.sample for _, kept in every[:count]]
            return [sample._replace(file=name_of(self.split, sample.number)) for sample in found]

        names = getattr(datamodule, "class_names", None)
        gathered = Gathered(
            split=self.split,
            confusion=sum(matrices[1:], matrices[0]),
            calibration=sum((found[4] for found in each[1:]), each[0][4]),
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
