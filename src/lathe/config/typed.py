"""Values as they are typed on a command line. Imports no torch."""

import math
import re
from typing import Any

QUOTES = ("'", '"')
ITEM = r"""(?:[^,\[\]'"]|\[[^\]]*\]|'[^']*'|"[^"]*")+"""  # of a list, whose brackets and quotes close
# Keys whose value may have a = in it: an override, baseline=optimizer.lr=0.1, or a path, .../epoch=4-step=100.ckpt.
WITH_EQUALS = ("baseline", "run", "ckpt_path", "resume", "checkpoint", "input", "output")


def in_quotes(key: str, value: str) -> str:
    """The value of a key in the quotes that Hydra's grammar wants around a = in it."""
    if key == "where":
        return quoted_items(value)
    plain = "=" in value and "," not in value and value[0] not in (*QUOTES, "[", "$")
    return repr(value) if plain and key in WITH_EQUALS else value


def quoted_items(text: str) -> str:
    """A list as it is typed, [a=b,c>=1], with each item in the quotes that Hydra's grammar wants around such words."""
    inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if not re.fullmatch(rf"(?:{ITEM}|,)*", inside):
        return text  # brackets or quotes that don't close: Hydra tells their place
    bare = [item.strip() for item in re.findall(ITEM, inside) if item.strip()]
    return f"[{','.join(item if item[0] in QUOTES else repr(item) for item in bare)}]"


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
