"""How much of a net is removed by when: an absolute sparsity as a function of the optimizer step."""

from dataclasses import dataclass
from typing import Literal

from lathe.errors import UserError

Kind = Literal["one_shot", "linear", "cubic", "exponential", "stepped"]
KINDS = ("one_shot", "linear", "cubic", "exponential", "stepped")


@dataclass(frozen=True)
class SparsitySchedule:
    """Sparsity from `initial` at optimizer step `start` to `final` at step `end`, brought up to date every `every`
    steps and at `end`. What follows `end` is recovery: the masks stay.

    With t, the share of the way from start to end:

    - one_shot: `final` at `start` at once; `end` has no say.
    - linear: initial + (final - initial) t.
    - cubic: final + (initial - final) (1 - t)^3, fast while there is much to remove (Zhu and Gupta 2017,
      arXiv:1710.01878).
    - exponential: what remains falls by the same factor in each step: 1 - (1 - initial) ((1 - final) / (1 -
      initial))^t.
    - stepped: `jumps` equal jumps, the first at `start`, the last at `end`.

    Steps count from 1; 0 is before the first.

    Raises:
        UserError: a value out of range, named `prefix`.key.
    """

    final: float
    kind: Kind = "cubic"
    initial: float = 0.0
    start: int = 0
    end: int = 0
    every: int = 1
    jumps: int = 4
    prefix: str = "schedule"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"{self.prefix}.schedule={self.kind} is unknown: choose {', '.join(KINDS)}.")
        if not 0 < self.final < 1:
            raise UserError(
                f"{self.prefix}.sparsity={self.final} is not between 0 and 1: give the share to remove, such as 0.8."
            )
        if not 0 <= self.initial <= self.final:
            raise UserError(
                f"{self.prefix}.initial_sparsity={self.initial} is not between 0 and sparsity={self.final}."
            )
        if not 0 <= self.start <= self.end and self.kind != "one_shot":
            raise UserError(
                f"{self.prefix}.start and end are steps {self.start} and {self.end}: the end must not come first."
            )
        if self.every < 1:
            raise UserError(f"{self.prefix}.every_n_steps={self.every} is below 1: give optimizer steps, or null.")
        if self.jumps < 1:
            raise UserError(f"{self.prefix}.jumps={self.jumps} is below 1: give a number of jumps, such as 4.")

    @property
    def last(self) -> int:
        """The step of the last update."""
        return self.start if self.kind == "one_shot" else self.end

    def due(self, step: int) -> bool:
        """Whether masks are brought up to date after this optimizer step."""
        if step == self.last:
            return True
        if not self.start <= step < self.last:
            return False
        if self.kind == "stepped":
            return self._jumps_by(step) > self._jumps_by(step - 1)
        return (step - self.start) % self.every == 0

    def at(self, step: int) -> float:
        """The sparsity from this optimizer step on, between updates as if there were one at each step; 0 before
        `start`.
        """
        if step < self.start:
            return 0.0
        if step >= self.last:
            return self.final
        if self.kind == "stepped":
            return self.initial + (self.final - self.initial) * self._jumps_by(step) / self.jumps
        t = (step - self.start) / (self.end - self.start)
        if self.kind == "linear":
            return self.initial + (self.final - self.initial) * t
        if self.kind == "cubic":
            return self.final + (self.initial - self.final) * (1 - t) ** 3
        ratio: float = ((1 - self.final) / (1 - self.initial)) ** t
        return 1 - (1 - self.initial) * ratio

    def _jumps_by(self, step: int) -> int:
        """How many jumps have been made by `step`; jump i of `jumps` comes i / (jumps - 1) of the way, from i = 0."""
        if step < self.start:
            return 0
        if step >= self.end:
            return self.jumps
        return 1 + (step - self.start) * (self.jumps - 1) // (self.end - self.start) if self.jumps > 1 else 0
