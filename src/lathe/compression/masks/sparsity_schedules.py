"""Sparsity schedules over optimizer steps."""

from dataclasses import dataclass

from lathe.config.types import Count, OpenShare, ShareBelowOne, SparsityCurve
from lathe.config.validation import validated
from lathe.errors import ArgumentError


@validated
@dataclass(frozen=True)
class SparsitySchedule:
    """Sparsity from `initial_sparsity` at optimizer step `start` to `sparsity` at step `end`.

    Masks are updated every `every_n_steps` steps and at `end`, and then fixed. With the initial and final sparsity, and
    t, the share of the way from start to end:

    - one_shot: final at `start`; `end` is not used.
    - linear: initial + (final - initial) t.
    - cubic: final + (initial - final) (1 - t)^3 (Zhu and Gupta 2017, arXiv:1710.01878).
    - exponential: 1 - (1 - initial) ((1 - final) / (1 - initial))^t.
    - stepped: `jumps` equal jumps, the first at `start`, the last at `end`.

    Steps count from 1; 0 is before the first.
    """

    sparsity: OpenShare
    schedule: SparsityCurve = "cubic"
    initial_sparsity: ShareBelowOne = 0.0
    start: int = 0
    end: int = 0
    every_n_steps: Count = 1
    jumps: Count = 4

    def __post_init__(self) -> None:
        if self.initial_sparsity > self.sparsity:
            raise ArgumentError(
                f"initial_sparsity={self.initial_sparsity} is above sparsity={self.sparsity}: lower it."
            )
        if not 0 <= self.start <= self.end and self.schedule != "one_shot":
            raise ArgumentError(f"start={self.start} and end={self.end} are steps: the end must not come first.")

    @property
    def last(self) -> int:
        """Return the step of the last update."""
        return self.start if self.schedule == "one_shot" else self.end

    def due(self, step: int) -> bool:
        """Return whether masks are updated after this optimizer step."""
        if step == self.last:
            return True
        if not self.start <= step < self.last:
            return False
        if self.schedule == "stepped":
            return self._jumps_by(step) > self._jumps_by(step - 1)
        return (step - self.start) % self.every_n_steps == 0

    def at(self, step: int) -> float:
        """Return the sparsity after this optimizer step, as if masks were updated at each; 0 before `start`."""
        if step < self.start:
            return 0.0
        if step >= self.last:
            return self.sparsity
        if self.schedule == "stepped":
            return self.initial_sparsity + (self.sparsity - self.initial_sparsity) * self._jumps_by(step) / self.jumps
        t = (step - self.start) / (self.end - self.start)
        if self.schedule == "linear":
            return self.initial_sparsity + (self.sparsity - self.initial_sparsity) * t
        if self.schedule == "cubic":
            return self.sparsity + (self.initial_sparsity - self.sparsity) * (1 - t) ** 3
        ratio: float = ((1 - self.sparsity) / (1 - self.initial_sparsity)) ** t
        return 1 - (1 - self.initial_sparsity) * ratio

    def _jumps_by(self, step: int) -> int:
        """Count the jumps up to `step`; jump i of `jumps`, from 0, is at i / (jumps - 1) of the way."""
        if step < self.start:
            return 0
        if step >= self.end:
            return self.jumps
        return 1 + (step - self.start) * (self.jumps - 1) // (self.end - self.start) if self.jumps > 1 else 0
