"""What every key takes: kinds, ranges and choices, in one place. Imports no torch."""

from lathe.schema.check import Problem, follows, problems, rules
from lathe.schema.names import renamed
from lathe.schema.rule import kind_of, shown
from lathe.schema.together import CLASHES, CONTRADICTIONS, Taken, Together, together

__all__ = [
    "CLASHES",
    "CONTRADICTIONS",
    "Problem",
    "Taken",
    "Together",
    "follows",
    "kind_of",
    "problems",
    "renamed",
    "rules",
    "shown",
    "together",
]
