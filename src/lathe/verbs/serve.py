"""Serve a finished run over HTTP."""

from importlib.util import find_spec
from typing import Any

from lathe.errors import UserError


def serve(cfg: dict[str, Any]) -> None:
    """Start `lathe.serving.server.serve`, if its packages are installed."""
    missing = [name for name in ("starlette", "uvicorn", "httptools", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise UserError(f"scripts/serve.py needs {', '.join(missing)}: pip install -e '.[serve]'.")
    from lathe.serving import server

    server.serve(cfg)
