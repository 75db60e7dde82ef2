"""Lines of logged steps amid others that nobody looks at: noted in each, and written behind the last."""

import math
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer


class Notes:
    """What some parts log of a step without looking at it.

    Such a part has `quiet_steps`, and of the step behind those either `note_start(trainer)` or `note_end(trainer)`,
    which give the metrics of its line, or None: before its forward pass and after its update. `can_note(trainer)` says
    whether they are enough for that step. Behind the last of several steps `noted(trainer)` may fill in what was not
    known yet, and then all is written. It is for one process: several would have to add up metrics at the same steps.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Any = trainer
        self.parts: list[tuple[Any, Callable[[Any], float]]] = []
        self.rows: list[tuple[int, dict[str, Any]]] = []

    def add(self, part: Any, quiet: Callable[[Any], float]) -> bool:
        """Whether it is one of these."""
        takes = self.trainer.world_size == 1 and can_note(part)
        if takes:
            self.parts.append((part, quiet))
        return takes

    def next(self, most: float) -> tuple[float, list[Any]]:
        """How many of the next `most` steps these parts leave to themselves, and those that take note of the last."""
        trainer, coming, noting = self.trainer, math.inf, list[Any]()
        for part, ask in self.parts:
            quiet = ask(trainer)
            if not part.can_note(trainer):
                most = min(most, quiet)
            elif quiet < coming:
                coming, noting = quiet, [part]
            elif quiet == coming:
                noting.append(part)
        return (coming + 1, noting) if 0 <= coming < most else (most, [])

    def start(self, noting: list[Any]) -> None:
        self._take(noting, "note_start", self.trainer.global_step + 1)

    def end(self, noting: list[Any]) -> None:
        self._take(noting, "note_end", self.trainer.global_step)

    def _take(self, noting: list[Any], name: str, step: int) -> None:
        for part in noting:
            note = getattr(part, name, None)
            if note is not None and (row := note(self.trainer)) is not None:
                self.rows.append((step, row))

    def write(self) -> None:
        """One line for each step."""
        if not self.rows:
            return
        rows, self.rows = self.rows, []
        for part, _ in self.parts:
            if (noted := getattr(part, "noted", None)) is not None:
                noted(self.trainer)
        lines = dict[int, dict[str, Any]]()
        for step, row in rows:
            lines.setdefault(step, {}).update(row)
        for logger in self.trainer.loggers:
            for step, line in lines.items():
                if line:
                    logger.log_metrics(dict(line), step=step)


def can_note(part: Any) -> bool:
    """Whether its class has a word on notes that is as new as those on its hooks."""
    if "can_note" in vars(part):
        return True
    for kind in type(part).__mro__:
        if "can_note" in vars(kind):
            return True
        if "quiet_steps" in vars(kind):
            return False
    return False
