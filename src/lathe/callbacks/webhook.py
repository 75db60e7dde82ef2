"""Post messages to a user's address from a thread."""

import json
import logging
import os
import queue
import threading
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from lathe.errors import require

log = logging.getLogger(__name__)
ENV = "env:"  # prefix of the name of an environment variable that holds the address
MOST = 100  # queued messages: more are dropped


class _NoRedirect(HTTPRedirectHandler):
    """Treat a redirect as an error: messages are sent only to the given address."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class Webhook:
    """Post JSON to an http or https address; warn of the first message that is lost.

    Log messages contain only host and port: the rest of the address is often a secret.
    """

    def __init__(self, url: str, timeout: float, key: str) -> None:
        self._url, self._timeout, self._key = _address(url, key), timeout, key
        parts = urlsplit(self._url)
        self.host = f"{parts.scheme}://{parts.netloc}"  # `_address` refuses a login
        self._waiting: queue.Queue[bytes | None] = queue.Queue(MOST)
        self._thread: threading.Thread | None = None
        self._told = False

    def post(self, message: Mapping[str, Any]) -> None:
        """Queue a message."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lathe-webhook", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(json.dumps(message, allow_nan=False).encode())
        except queue.Full:
            self._tell(f"more than {MOST} messages wait")

    def close(self) -> None:
        """Wait for queued messages, at most `timeout`."""
        if self._thread is None:
            return
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(self._timeout)
        self._thread = None

    def _run(self) -> None:
        opener = build_opener(_NoRedirect)
        while (body := self._waiting.get()) is not None:
            headers = {"Content-Type": "application/json", "User-Agent": "lathe"}
            request = Request(self._url, body, headers)  # noqa: S310, its scheme was checked
            try:
                with opener.open(request, timeout=self._timeout):
                    pass
            except HTTPError as error:
                self._tell(f"status {error.code}")
                error.close()
            except URLError as error:
                self._tell(str(error.reason))
            except Exception as error:  # the thread must not die; some errors contain the address
                self._tell(type(error).__name__)

    def _tell(self, reason: str) -> None:
        if not self._told:
            self._told = True
            log.warning("%s: %s did not take a message (%s); this is said once.", self._key, self.host, reason)


def _address(url: str, key: str) -> str:
    shown = key
    if url.startswith(ENV):
        name = url.removeprefix(ENV)
        shown = f"{key}={url}"
        require(name in os.environ, f"{shown}: the environment has no variable {name}: set it to the address.")
        url = os.environ[name]
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
        fits = fits and (parts.port is None or parts.port > 0) and url.isascii() and url.isprintable()
    except ValueError:
        fits = False
    require(
        fits and " " not in url,
        f"{shown}: expected an http:// or https:// address without a login, and a port from 1 to 65535 if any, such as https://host/path.",
    )
    return url
