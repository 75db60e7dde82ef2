"""torch's elastic agent names the method that it is in by `inspect.stack()`, which reads the sources of all callers and
looks through all modules: under pytest half a second each time, thirty times a start. It only needs the name.
"""

import sys

from torch.distributed.elastic.rendezvous import dynamic_rendezvous


def _method_name(depth: int = 2) -> str:
    return sys._getframe(depth).f_code.co_name


def quick() -> None:
    """From now on in this process."""
    dynamic_rendezvous.get_method_name = _method_name
