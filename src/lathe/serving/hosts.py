"""Whom a request is meant for and which page sent it, so that a page of the web can't use a browser to reach a server
that has no key.

A page's own name may be made to resolve to 127.0.0.1 (DNS rebinding): its requests then carry that name as their Host.
Addresses and localhost can't be made to resolve to anything else. A page may also send requests to the server by its
real name (cross-site requests): browsers tell whose page it is by Origin and Sec-Fetch-Site.
https://fetch.spec.whatwg.org/#http-origin, RFC 9110 7.2, RFC 6761 6.3.
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
    """`listening` is the address or name that the server listens at, `named` what the user allows besides: names,
    addresses, or `*`.
    """

    def __init__(self, listening: str, named: Collection[str]) -> None:
        self.named = {plain(name) for name in named}
        self.own = plain(listening)
        self.everywhere = (found := address(self.own)) is not None and found.is_unspecified

    def check(self, scope: Mapping[str, Any]) -> None:
        """Of an ASGI request, whose `state["target"]` is the target of the request line.

        Raises:
            BadRequest: 421 it is meant for another server, or for none; 403 a page of another site sent it.
        """
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        target = scope["state"].get("target", b"/").decode("latin-1")
        if len(hosts) != 1:
            raise BadRequest(
                421, f"The request has {len(hosts)} headers Host: send one, with a name that hosts=[...] allows."
            )
        if "://" in target and not target.startswith(
            "/"
        ):  # a whole address, which counts in place of the header: RFC 9112 3.2.2
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
        # at 0.0.0.0 a machine, or what forwards to it, may have any address
        return found is not None and (
            found.is_loopback or self.everywhere or (server is not None and found == address(server))
        )

    def _check_page(self, scope: Mapping[str, Any], host: str) -> None:
        fields = {name: value.decode("latin-1").lower() for name, value in scope["headers"]}
        origin, site = fields.get(b"origin"), fields.get(b"sec-fetch-site", "none")
        if origin is not None:
            sent = origin.partition("://")[2]  # the scheme is https where a proxy has TLS
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
    """A host's name as it is compared: without the brackets of an IPv6 address or the root's dot."""
    return name.lower().removeprefix("[").removesuffix("]").removesuffix(".")


def address(text: str) -> IPv4Address | IPv6Address | None:
    """The IP address that `text` is, an IPv4 one that IPv6 carries as itself; None for a name."""
    try:
        found = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found
