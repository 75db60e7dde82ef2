"""Lightning's Trainer with loops of our own: several optimizer steps per call, exact logging and exact resume.

`trainer.py` has the Trainer and its loops, `multi_step.py` groups of steps; a single step is Lightning's.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
