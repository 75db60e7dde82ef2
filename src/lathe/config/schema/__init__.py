"""What every key takes: kinds, ranges and choices, in one place. Imports no torch."""

from lathe.config.schema.check import Problem, follows, places_of, problems, rules
from lathe.config.schema.rule import kind_of, shown
from lathe.config.schema.together import CLASHES, CONTRADICTIONS, Taken, Together, together
from lathe.config.schema.verbs import TRAIN, TRAINING

__all__ = [
    "CLASHES",
    "CONTRADICTIONS",
    "TRAIN",
    "TRAINING",
    "Problem",
    "Taken",
    "Together",
    "follows",
    "kind_of",
    "places_of",
    "problems",
    "rules",
    "shown",
    "together",
]
