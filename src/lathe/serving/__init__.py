"""A run behind HTTP: worker processes with batches of whatever requests come together."""

from typing import Any

__all__ = ["serve"]


def serve(cfg: dict[str, Any]) -> None:
    """The job of scripts/serve.py, as `lathe.serving.server.serve`.

    Raises:
        UserError: also when a package that it needs is not installed.
    """
    from importlib.util import find_spec

    from lathe.errors import UserError

    missing = [name for name in ("starlette", "uvicorn", "httptools", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise UserError(f"scripts/serve.py needs {', '.join(missing)}: pip install -e '.[serve]'.")
    from lathe.serving import server

    server.serve(cfg)
