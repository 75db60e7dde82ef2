"""The API key: /predict, /info and /metrics ask for it; / and /health are open, so that a browser and a load balancer
reach them.
"""

import hmac
from collections.abc import Mapping

from lathe.serving.limits import BadRequest

OPEN = ("/", "/health")


def check(path: str, headers: Mapping[str, str], key: str | None) -> None:
    """`headers` carry the key as `X-API-Key: <key>` or `Authorization: Bearer <key>`. Compared in constant time.

    Raises:
        BadRequest: 401 it is missing or wrong.
    """
    if key is None or path in OPEN:
        return
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    sent = headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
    if not hmac.compare_digest(sent.encode("utf-8", "replace"), key.encode()):
        raise BadRequest(401, f"The API key is {'wrong' if sent else 'missing'}: send it in the header X-API-Key.")
