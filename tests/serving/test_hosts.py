"""Checks of a request's Host and Origin."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from support.server_in_process import Here
from support.server_process import BINARY, receive

from lathe.serving.hosts import Hosts
from lathe.serving.limits import BadRequest
from lathe.serving.model import describe


def verdict(
    hosts: Hosts, *host: str, target: str = "/predict", server: str = "127.0.0.1", method: str = "POST", **headers: str
) -> int:
    """Return the status of a refusal, or 200."""
    fields = [("host", name) for name in host] + [(name.replace("_", "-"), value) for name, value in headers.items()]
    scope = {
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in fields],
        "state": {"target": target.encode()},
        "server": (server, 8000),
        "method": method,
        "path": target,
    }
    found: list[BadRequest] = []
    try:
        hosts.check(scope)
    except BadRequest as error:
        found.append(error)
    assert all("hosts=[" in error.sentence and re.fullmatch(r"[^\n]+\.", error.sentence) for error in found)
    return found[0].status if found else 200


LOOPBACK = ["localhost", "LOCALHOST:8000", "a.localhost:1", "127.0.0.1", "127.8.9.1:80", "[::1]:8000"]
OTHERS = ["evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evillocalhost", "10.0.0.7:8000"]
OTHERS += ["0.0.0.0", "[::]", "2130706433", "127.1", "0x7f.0.0.1"]
MALFORMED = ["", ":8000", "[::1", "a b", "user@localhost", "localhost:x", "localhost,evil", "http://localhost", "é"]


def test_loopback_reaches_a_server_and_names_of_the_web_do_not() -> None:
    for hosts in (Hosts("127.0.0.1", ()), Hosts("::1", ()), Hosts("localhost", ())):
        assert [verdict(hosts, name) for name in LOOPBACK] == [200] * len(LOOPBACK)
        assert [verdict(hosts, name) for name in OTHERS + MALFORMED] == [421] * len(OTHERS + MALFORMED)
        assert verdict(hosts) == 421
        assert verdict(hosts, "localhost", "localhost") == 421
        assert verdict(hosts, "localhost", "evil.example") == 421


def test_a_server_is_reached_where_it_listens() -> None:
    one = Hosts("192.168.1.5", ())
    assert verdict(one, "192.168.1.5:8000", server="192.168.1.5") == 200
    assert verdict(one, "192.168.1.6", server="192.168.1.5") == 421
    named = Hosts("Box.lan", ())
    for name, status in (("box.lan:8000", 200), ("10.0.0.2", 200), ("10.0.0.3", 421), ("evil.lan", 421)):
        assert verdict(named, name, server="10.0.0.2") == status
    for everywhere in (Hosts("0.0.0.0", ()), Hosts("::", ())):  # DNS rebinding does not apply to addresses
        assert [
            verdict(everywhere, name, server="172.17.0.2") for name in ("192.168.1.5", "[fe80::1]:80", "172.17.0.2")
        ] == [200] * 3
        assert [verdict(everywhere, name) for name in ("box", "evil.example", "127.1")] == [421] * 3


def test_hosts_that_the_user_names() -> None:
    hosts = Hosts("127.0.0.1", ("Net.Example.org", "10.1.2.3", "[2001:db8::1]"))
    assert [
        verdict(hosts, name) for name in ("net.example.org", "net.example.org.:443", "10.1.2.3", "[2001:db8::1]:1")
    ] == [200] * 4
    assert [verdict(hosts, name) for name in ("example.org", "a.net.example.org", "10.1.2.4", "localhost:x")] == [
        421
    ] * 4
    assert [verdict(Hosts("127.0.0.1", ("*",)), name) for name in OTHERS] == [200] * len(OTHERS)
    assert [verdict(Hosts("127.0.0.1", ("*",)), name) for name in MALFORMED] == [421] * len(MALFORMED)


def test_a_whole_address_in_the_request_line_counts() -> None:
    hosts = Hosts("127.0.0.1", ())
    assert verdict(hosts, "localhost", target="http://localhost:8000/predict") == 200
    assert verdict(hosts, "localhost", target="http://evil.example/predict") == 421
    assert verdict(hosts, "evil.example", target="http://localhost/predict") == 421
    assert verdict(hosts, "localhost", target="http://localhost@evil.example/") == 421
    assert verdict(hosts, "localhost", target="http://localhost?@evil.example/", origin="http://localhost") == 200


def test_pages_of_other_sites_are_refused() -> None:
    hosts = Hosts("127.0.0.1", ("app.example.org",))
    own = {"origin": "http://localhost:8000", "sec_fetch_site": "same-origin"}
    assert verdict(hosts, "localhost:8000", **own) == 200
    assert verdict(hosts, "LOCALHOST:8000", **own) == 200
    assert verdict(hosts, "app.example.org", origin="https://app.example.org") == 200  # TLS ended at a proxy
    assert (
        verdict(hosts, "127.0.0.1:8000", origin="https://app.example.org") == 200
    )  # by a proxy that sends its own Host
    others = ("http://localhost:3000", "http://evil.example", "null", "", "http://app.example.org.evil.example")
    for origin in (*others, "http://localhost:8000/x", "http://localhost:8000@evil.example"):
        assert verdict(hosts, "localhost:8000", origin=origin) == 403, origin
    for site in ("cross-site", "same-site", "anything"):
        assert verdict(hosts, "localhost", method="GET", target="/health", sec_fetch_site=site) == 403
        assert verdict(hosts, "localhost", method="GET", target="/", sec_fetch_site=site) == 200  # a link to the page
    for site in ("none", "same-origin"):
        assert verdict(hosts, "localhost", method="GET", target="/health", sec_fetch_site=site) == 200
    assert verdict(Hosts("127.0.0.1", ("*",)), "localhost", origin="http://evil.example") == 200


@pytest.fixture(scope="module", params=[None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def server(
    request: pytest.FixtureRequest, served_run: Path, bare: Callable[..., Any], options: Callable[..., Any]
) -> Iterator[Here]:
    found = options(header_timeout=1, body_timeout=1.5, max_connections=8)
    given = {} if request.param is None else {"loop": request.param}
    with Here(found, describe(str(served_run), "onnx", "best"), bare, **given) as here:
        yield here


def test_every_path_asks_whom_it_is_meant_for(server: Here) -> None:
    for path in ("/", "/health", "/info", "/metrics", "/predict", "/nothing"):
        refused = server.ask("GET", path, host="evil.example")
        assert (refused.status, refused.sentence.startswith("'evil.example' is not this server")) == (421, True)
    body = bytes(64)
    assert server.ask("POST", "/predict", body, content_type=BINARY, host="evil.example").status == 421
    assert server.ask("POST", "/predict", body, content_type=BINARY, origin="http://evil.example").status == 403
    found = server.ask("POST", "/predict", body, content_type=BINARY, origin="http://localhost")
    assert found.status == 200
    kept = ("x-content-type-options", "x-frame-options", "cross-origin-resource-policy")
    assert [found.headers[name] for name in kept] == ["nosniff", "DENY", "same-origin"]
    assert "access-control-allow-origin" not in found.headers


def test_a_refusal_is_read_by_a_client_that_still_sends(server: Here) -> None:
    for sent in (b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 3_000_000, b"nonsense\r\n" * 300_000):
        with server.connect() as connection:
            with contextlib.suppress(OSError):  # the server has stopped reading
                connection.sendall(sent)
            assert receive(connection).status in (400, 431)
