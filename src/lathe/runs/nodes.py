"""Nodes of a configuration as Hydra names and builds them."""

import re
from typing import Any


def located(node: Any, path: str) -> tuple[str, Any]:
    """The key below `node`, and what stands there, of a path as Hydra writes it: a list's last number has no brackets
    there, so that b.a[2][0] is b.a[2]0."""
    key = ""
    for part in filter(None, path.split(".")):
        names = {str(name): name for name in node}
        found = [name for name in names if part.startswith(name) and isinstance(node[names[name]], list)]
        if part not in names and not found:
            return path, {}
        name = part if part in names else max(found, key=len)
        node, key = node[names[name]], f"{key}.{name}" if key else name
        for number in re.findall(r"\d+", part[len(name) :]):
            node, key = node[int(number)], f"{key}[{number}]"
    return key, node
