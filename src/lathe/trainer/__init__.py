"""Lightning's Trainer with loops of our own: several optimizer steps per call, exact logging and exact resume.

`trainer.py` installs the loops of `loops.py`; a step is in `optimizer_step.py`, several in `multi_step.py`.
"""

from lathe.trainer.trainer import Trainer

__all__ = ["Trainer"]
