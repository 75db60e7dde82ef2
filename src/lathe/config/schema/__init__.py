"""Validation of configurations against configs/schema.json. Imports no torch."""

from lathe.config.schema.check import Problem, command_keys, follows, key_schemas, problems, training_commands
from lathe.config.schema.together import CLASHES, CONTRADICTIONS, Together, together
from lathe.config.values import kind_of, shown

__all__ = [
    "CLASHES",
    "CONTRADICTIONS",
    "Problem",
    "Together",
    "command_keys",
    "follows",
    "key_schemas",
    "kind_of",
    "problems",
    "shown",
    "together",
    "training_commands",
]
