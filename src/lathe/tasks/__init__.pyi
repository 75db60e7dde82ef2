from .base import SPLITS as SPLITS
from .base import Task as Task
from .classification import ClassificationTask as ClassificationTask
from .language_modelling import LanguageModellingTask as LanguageModellingTask
from .lightning import LightningTask as LightningTask
from .loss_and_metrics import Weighted as Weighted
from .multi_label import MultiLabelTask as MultiLabelTask
from .regression import RegressionTask as RegressionTask
