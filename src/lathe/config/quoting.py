"""Values in the grammar of Hydra's overrides. Imports no torch."""

import math
import re
from typing import Any

_QUOTES = ("'", '"')
_ITEM = r"""(?:[^,\[\]'"]|\[[^\]]*\]|'[^']*'|"[^"]*")+"""  # of a list, with its brackets and quotes closed
# Keys whose value may contain =, in an override (baseline=optimizer.lr=0.1) or a path (.../epoch=4-step=100.ckpt).
_SIDES = ("baseline", "candidate")  # labels of groups, or whole lists of overrides
_WITH_EQUALS = (*_SIDES, "run", "ckpt_path", "resume", "checkpoint", "input", "output")


def quote_equals(key: str, value: str) -> str:
    """Quote the value of a key if it contains =."""
    if key == "where":
        return _quote_items(value)
    is_bare = "=" in value and ("," not in value or key in _SIDES) and value[0] not in (*_QUOTES, "[", "$")
    return as_typed(value) if is_bare and key in _WITH_EQUALS else value


def _quote_items(text: str) -> str:
    """Quote each item of a list such as [a=b,c>=1]."""
    inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if not re.fullmatch(rf"(?:{_ITEM}|,)*", inside):
        return text  # Hydra reports where a bracket or quote is missing
    items = [item.strip() for item in re.findall(_ITEM, inside) if item.strip()]
    return f"[{','.join(item if item[0] in _QUOTES else repr(item) for item in items)}]"


def as_typed(value: Any) -> str:
    """Return a plain value as an override has it."""
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
    # backslashes are doubled before a quote, and only there
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", re.sub(r"(\\+)$", r"\1\1", str(value))) + "'"
