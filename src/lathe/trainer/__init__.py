"""Lightning's Trainer with loops of our own: several optimizer steps per call, exact logging and exact resume.

`trainer.py` installs the loops of `loops.py`; a step is in `optimizer_step.py`, several in `multi_step.py`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
