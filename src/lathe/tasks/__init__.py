"""LightningModules: what a batch, a loss and a metric are. A task wraps a net; everything hard is in callbacks and
strategies.
"""

from lathe.nets.init import apply_init
from lathe.tasks.base import SPLITS, Task
from lathe.tasks.classification import ClassificationTask
from lathe.tasks.language_modelling import LanguageModellingTask

__all__ = ["SPLITS", "ClassificationTask", "LanguageModellingTask", "Task", "apply_init"]
