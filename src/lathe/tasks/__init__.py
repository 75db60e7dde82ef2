"""LightningModules: what a batch, a loss and a metric are. A task wraps a net; everything hard is in callbacks and
strategies.
"""

from lathe.nets.init import apply_init
from lathe.tasks.base import SPLITS, Task
from lathe.tasks.classification import ClassificationTask
from lathe.tasks.language_modelling import LanguageModellingTask
from lathe.tasks.lightning import LightningTask
from lathe.tasks.loss import Weighted
from lathe.tasks.multi_label import MultiLabelTask
from lathe.tasks.regression import RegressionTask

__all__ = [
    "SPLITS",
    "ClassificationTask",
    "LanguageModellingTask",
    "LightningTask",
    "MultiLabelTask",
    "RegressionTask",
    "Task",
    "Weighted",
    "apply_init",
]
