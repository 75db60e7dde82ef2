from .launch.api import compose as compose
from .launch.api import train as train
from .trainer import Trainer as Trainer
from .verbs.load import load as load
from .verbs.load import restore as restore
from .verbs.plain_module import compress as compress
from .verbs.plain_module import export_module as export_module
from .verbs.report import runs_frame as runs_frame
