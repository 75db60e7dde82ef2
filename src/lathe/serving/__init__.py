"""A run behind HTTP: LitServe's workers with batches of whatever requests come together."""

from typing import Any

__all__ = ["serve"]


def serve(cfg: dict[str, Any]) -> None:
    """The job of scripts/serve.py, as `lathe.serving.server.serve`.

    Raises:
        UserError: also when LitServe is not installed.
    """
    from importlib.util import find_spec

    from lathe.errors import UserError

    missing = [name for name in ("litserve", "prometheus_client", "httptools") if find_spec(name) is None]
    if missing:
        raise UserError(f"scripts/serve.py needs {', '.join(missing)}: pip install -e '.[serve]'.")
    from lathe.serving import server

    server.serve(cfg)
