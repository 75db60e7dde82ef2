"""Disables garbage collection until `ahead`, the last import of the server of `processes.py`."""

import gc

gc.disable()
