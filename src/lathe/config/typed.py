"""Values as they are typed on a command line. Imports no torch."""

import math
import re
from typing import Any


def as_typed(value: Any) -> str:
    """A plain value as Hydra's grammar of overrides reads it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(as_typed, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_typed(item)}" for key, item in value.items()) + "}"
    # backslashes are doubled before a quote alone
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", re.sub(r"(\\+)$", r"\1\1", str(value))) + "'"
