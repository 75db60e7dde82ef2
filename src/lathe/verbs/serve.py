"""Serve a finished run over HTTP."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lathe.errors import UserError
from lathe.serving import model
from lathe.serving import options as serve_options


def serve(cfg: dict[str, Any]) -> None:
    """Serve the requested export or net of a run; raise UserError for one that can't be served."""
    options = serve_options.read(cfg["request"], str(Path(cfg["paths"]["run_dir"])))
    facts = model.describe(options.run, options.target, options.checkpoint)
    missing = [name for name in ("starlette", "uvicorn", "httptools", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise UserError(f"scripts/serve.py needs {', '.join(missing)}: pip install -e '.[serve]'.")
    from lathe.serving import server

    server.serve(options, facts)
