"""Messages that arrive, and those that don't, each with a server on this machine."""

import logging
from collections.abc import Iterator

import pytest
from support.listening import Listener, listening

from lathe.contrib.alerts import Webhook
from lathe.errors import UserError

KEY = "callbacks.alerts.url"


@pytest.fixture
def server() -> Iterator[Listener]:
    with listening() as found:
        yield found


def url(server: Listener, path: str = "hooks/secret") -> str:
    return f"http://127.0.0.1:{server.port}/{path}"


def test_messages_arrive_in_order_as_json(server: Listener, caplog: pytest.LogCaptureFixture) -> None:
    hook = Webhook(url(server), 30)
    hook.post({"text": "slow", "value": 0.5})
    hook.post({"text": "hot, 95 °C", "value": None})
    hook.close()
    assert server.messages == [{"text": "slow", "value": 0.5}, {"text": "hot, 95 °C", "value": None}]
    assert server.paths == ["/hooks/secret"] * 2
    assert [headers["Content-Type"] for headers in server.headers] == ["application/json"] * 2
    assert not caplog.records


def test_a_failure_is_told_once_by_the_host_alone(server: Listener, caplog: pytest.LogCaptureFixture) -> None:
    server.status = 403
    hook = Webhook(url(server), 30)
    for number in range(3):
        hook.post({"number": number})
    hook.close()
    assert len(server.messages) == 3
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"127.0.0.1:{server.port}" in said
    assert "403" in said
    assert "secret" not in said


def test_an_address_that_does_not_answer_holds_nobody_up(server: Listener, caplog: pytest.LogCaptureFixture) -> None:
    server.held.clear()
    hook = Webhook(url(server), 0.05)
    for number in range(300):  # more than the queue holds
        hook.post({"number": number})
    hook.close()
    with caplog.at_level(logging.WARNING):
        said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "timed out" in said[0] or "more than 100 messages wait" in said[0]


def test_an_address_in_the_environment(server: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATHE_TEST_HOOK", url(server))
    hook = Webhook("env:LATHE_TEST_HOOK", 30)
    hook.post({"a": 1})
    hook.close()
    assert server.messages == [{"a": 1}]
    monkeypatch.delenv("LATHE_TEST_HOOK")
    with pytest.raises(UserError, match=rf"^{KEY}=env:LATHE_TEST_HOOK: "):
        Webhook("env:LATHE_TEST_HOOK", 30)


@pytest.mark.parametrize("address", ["file:///etc/secret", "http://me:secret@host/", "http://host:port/secret"])
def test_another_address_is_refused_without_showing_it(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATHE_TEST_HOOK", address)
    with pytest.raises(UserError) as told:
        Webhook("env:LATHE_TEST_HOOK", 30)
    assert str(told.value).startswith(f"{KEY}=env:LATHE_TEST_HOOK: ")
    assert "secret" not in str(told.value)
