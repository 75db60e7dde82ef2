from .base import Task as Task
from .classification import ClassificationTask as ClassificationTask
from .language_modelling import LanguageModellingTask as LanguageModellingTask
from .lightning import LightningTask as LightningTask
from .loss import Weighted as Weighted
from .metric_sums import SPLITS as SPLITS
from .multi_label import MultiLabelTask as MultiLabelTask
from .regression import RegressionTask as RegressionTask
