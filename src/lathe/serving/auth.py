"""The API key, required by /predict, /info and /metrics. Browsers and load balancers reach / and /health without it."""

import hmac
from collections.abc import Mapping

from lathe.serving.limits import BadRequest

OPEN = ("/", "/health")


def check(path: str, headers: Mapping[str, str], key: str | None) -> None:
    """Check the key in `X-API-Key: <key>` or `Authorization: Bearer <key>`, in constant time."""
    if key is None or path in OPEN:
        return
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    sent = headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
    if not hmac.compare_digest(sent.encode("utf-8", "replace"), key.encode()):
        raise BadRequest(401, f"The API key is {'wrong' if sent else 'missing'}: send it in the header X-API-Key.")
