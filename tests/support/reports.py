"""The defaults of configs/report.yaml, without `runs`."""

from typing import Any

import yaml

from support.runs import ROOT

_KEYS: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "report.yaml").read_text())
REQUEST = {key: value for key, value in _KEYS.items() if key not in ("defaults", "runs", "paths")}
