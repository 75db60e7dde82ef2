"""Disables garbage collection before the other imports of the server of `processes.py`.

It would take a sixth of their time. `ahead`, the last import, enables it again.
"""

import gc

gc.disable()
