"""Checks Host and Origin, so that a web page can't use a browser to reach a server without a key.

A page's own name may resolve to 127.0.0.1 (DNS rebinding): its requests then have that name as their Host. IP addresses
and localhost can't be rebound. A page may also send cross-site requests to the server's real name, which browsers mark
with Origin and Sec-Fetch-Site. https://fetch.spec.whatwg.org/#http-origin, RFC 9110 7.2, RFC 6761 6.3.
"""

import re
from collections.abc import Collection, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from lathe.serving.bodies import quoted
from lathe.serving.limits import BadRequest

AUTHORITY = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(?::\d{0,5})?")
NAME = re.compile(r"[a-z0-9._-]{1,253}")
ANY = "*"


class Hosts:
    """The hosts that requests may name.

    `listening` is the address or name of the server, `named` the names and addresses that the user allows in addition,
    or `*`.
    """

    def __init__(self, listening: str, named: Collection[str]) -> None:
        self.named = {plain(name) for name in named}
        self.own = plain(listening)
        self.everywhere = (found := address(self.own)) is not None and found.is_unspecified

    def check(self, scope: Mapping[str, Any]) -> None:
        """Check an ASGI request; `scope["state"]["target"]` is the target of its request line.

        Raises:
            BadRequest: 421 it is for another server or has no host; 403 a page of another site sent it.
        """
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        target = scope["state"].get("target", b"/").decode("latin-1")
        if len(hosts) != 1:
            raise BadRequest(
                421, f"The request has {len(hosts)} headers Host: send one, with a name that hosts=[...] allows."
            )
        if "://" in target and not target.startswith("/"):  # an absolute URI replaces the header: RFC 9112 3.2.2
            hosts.append(target.partition("://")[2].partition("/")[0].partition("?")[0])
        server = scope["server"][0] if scope.get("server") else None
        for host in hosts:
            match = AUTHORITY.fullmatch(host.lower())
            if match is None:
                raise BadRequest(
                    421, f"The host {quoted(host)} can't be read: send a name or an address that hosts=[...] allows."
                )
            if not self._allows(plain(match[1]), server):
                raise BadRequest(
                    421, f"{quoted(host)} is not this server: if it should be, start it with hosts=[{match[1]}]."
                )
        if ANY not in self.named:
            self._check_page(scope, hosts[-1].lower())

    def _allows(self, name: str, server: str | None) -> bool:
        if (
            name in self.named
            or name == self.own
            or ANY in self.named
            or name == "localhost"
            or name.endswith(".localhost")
        ):
            return True
        found = address(name)
        # at 0.0.0.0 a machine, or a proxy that forwards to it, may have any address
        return found is not None and (
            found.is_loopback or self.everywhere or (server is not None and found == address(server))
        )

    def _check_page(self, scope: Mapping[str, Any], host: str) -> None:
        fields = {name: value.decode("latin-1").lower() for name, value in scope["headers"]}
        origin, site = fields.get(b"origin"), fields.get(b"sec-fetch-site", "none")
        if origin is not None:
            sent = origin.partition("://")[2]  # the scheme is https if a proxy terminates TLS
            match = AUTHORITY.fullmatch(sent)
            if sent == host or (match is not None and plain(match[1]) in self.named):
                return
            name = match[1] if match else "..."
            raise BadRequest(
                403, f"A page of {quoted(origin)} sent this: if it may, start the server with hosts=[{name}]."
            )
        opened = scope["method"] == "GET" and scope["path"] == "/"  # by a link on another page
        if site not in ("none", "same-origin") and not opened:
            raise BadRequest(
                403, "A page of another site sent this: open it at this server's own address, or say hosts=[...]."
            )


def plain(name: str) -> str:
    """Normalise a host's name for comparison: lower case, without IPv6 brackets and the root's dot."""
    return name.lower().removeprefix("[").removesuffix("]").removesuffix(".")


def address(text: str) -> IPv4Address | IPv6Address | None:
    """Parse an IP address; None for a name. An IPv4-mapped IPv6 address is returned as IPv4."""
    try:
        found = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found
