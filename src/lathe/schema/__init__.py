"""What every key takes: kinds, ranges and choices, in one place. Imports no torch."""

from lathe.schema.check import problems, references, rules
from lathe.schema.names import renamed
from lathe.schema.rule import kind_of
from lathe.schema.together import clashes, contradictions

__all__ = ["clashes", "contradictions", "kind_of", "problems", "references", "renamed", "rules"]
