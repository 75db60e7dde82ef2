"""Four kinds of problem, each reported once until it has recovered, in the log and by webhook."""

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.listening import Listener, listening
from support.nvml import FakeNvml, install
from support.runs import SMALL, new_run

import lathe.training.train
from lathe.config.resolve import flatten
from lathe.contrib import Alerts
from lathe.contrib.alerts import Webhook
from lathe.errors import UserError
from lathe.loggers import run_facts
from lathe.trust.allowlist import findings

NOTHING: dict[str, Any] = dict.fromkeys(("throughput_drop", "loss_rise", "temperature", "disk_free_gb"))


@pytest.fixture
def server() -> Iterator[Listener]:
    with listening() as found:
        yield found


@pytest.fixture
def looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[..., Any]:
    """Pass values at logged steps 10, 20, ...; return the alerts by step."""
    monkeypatch.setattr("lathe.contrib.alerts.EVERY", 0.0)
    caplog.set_level(logging.INFO, "lathe.contrib.alerts")

    def look(alerts: Alerts, values: list[Any], see: Callable[[Any], Any]) -> list[tuple[str, str]]:
        trainer: Any = SimpleNamespace(
            is_global_zero=True,
            log_every_n_steps=10,
            default_root_dir=str(tmp_path / "digits" / "run"),
            global_step=0,
            _logger_connector=None,
        )
        caplog.clear()
        for value in values:
            trainer.global_step += 10
            alerts.on_train_batch_end(trainer, None, see(value), None, 0)
        alerts.on_train_end(trainer, None)
        return [(record.levelname, record.getMessage()) for record in caplog.records]

    return look


def loss_of(value: float) -> dict[str, torch.Tensor]:
    return {"loss": torch.tensor(value)}


def test_a_loss_that_rises_is_told_once_until_it_falls(looked: Callable[..., Any], server: Listener) -> None:
    alerts = Alerts(**{**NOTHING, "loss_rise": 2.0}, url=f"http://127.0.0.1:{server.port}/x")
    losses = [4.0] * 5 + [1.0] * 5 + [3.0] * 8 + [1.0] * 5 + [5.0] * 5
    assert looked(alerts, losses, loss_of) == [
        ("WARNING", "Alert at step 130: the mean training loss of 5 logged steps is 2.2, above 2: the lowest was 1."),
        ("INFO", "Step 210: loss has recovered."),
        ("WARNING", "Alert at step 250: the mean training loss of 5 logged steps is 2.6, above 2: the lowest was 1."),
    ]
    first, second = server.messages
    text = "digits/run, step 130: the mean training loss of 5 logged steps is 2.2, above 2: the lowest was 1."
    assert first["text"] == text
    assert {key: first[key] for key in ("kind", "step", "limit")} == {"kind": "loss", "step": 130, "limit": 2.0}
    assert first["value"] == pytest.approx(2.2)
    assert first["run"].endswith("digits/run")
    assert second["step"] == 250


@pytest.mark.parametrize(
    ("losses", "steps"),
    [
        ([1.0] * 5 + [1.9] * 20, []),
        ([1.0] * 5 + [9.0, 1.0, 1.0, 1.0, 1.0], [60]),  # its mean is 2.6
        ([1.0] * 5 + [4.0, 1.0, 1.0, 1.0, 1.0], []),  # a single batch is noise
        ([1.0] * 5 + [1e-6] * 5 + [9e-3] * 5, []),  # a hundredth of the initial loss counts as zero
        ([-1.0] * 5 + [-4.0] * 5 + [-1.0] * 5, []),  # a log-likelihood: from -4 to 0
        ([-1.0] * 5 + [-4.0] * 5 + [1.0] * 5, [150]),
        ([1.0] * 5 + [math.nan] * 3, [60]),
        ([math.inf] * 6, [50]),
    ],
)
def test_what_is_a_rise(losses: list[float], steps: list[int], looked: Callable[..., Any], server: Listener) -> None:
    alerts = Alerts(**{**NOTHING, "loss_rise": 2.0}, url=f"http://127.0.0.1:{server.port}/x")
    looked(alerts, losses, loss_of)
    assert [message["step"] for message in server.messages] == steps


def test_throughput_that_drops(looked: Callable[..., Any]) -> None:
    alerts, windows = Alerts(**{**NOTHING, "throughput_drop": 0.4}), SimpleNamespace(newest=(0, None))
    alerts._throughput = windows

    def see(rate: float | None) -> None:
        if rate is not None:
            windows.newest = (windows.newest[0] + 1, rate)

    # None: a logged step without a new window. The first three are not judged; the median of the first four is 80.5.
    rates = [10.0, 100.0, 110.0, None, 61.0, 48.0, None, 45.0, 90.0, 30.0]
    assert looked(alerts, rates, see) == [
        ("WARNING", "Alert at step 60: throughput is 48 per second, below 48.3: the median was 80.5."),
        ("INFO", "Step 80: throughput has recovered."),
        ("WARNING", "Alert at step 100: throughput is 30 per second, below 36.6: the median was 61."),
    ]


def test_a_disk_that_fills(looked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free: dict[str, float] = {}

    def usage(path: str) -> SimpleNamespace:
        assert path == str(tmp_path / "digits" / "run")
        return SimpleNamespace(free=free["now"])

    monkeypatch.setattr("shutil.disk_usage", usage)
    alerts = Alerts(**{**NOTHING, "disk_free_gb": 5})
    said = looked(alerts, [6e9, 4.5e9, 4e9, 7e9, 1e9], lambda now: free.update(now=now))
    assert said == [
        ("WARNING", "Alert at step 20: the disk of the run has 4.5 GB left, below 5."),
        ("INFO", "Step 40: disk has recovered."),
        ("WARNING", "Alert at step 50: the disk of the run has 1 GB left, below 5."),
    ]


def test_a_gpu_that_is_hot(looked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    board: dict[str, Any] = {"celsius": 60}
    install(monkeypatch, FakeNvml(board=board), "board")
    monkeypatch.setattr("lathe.contrib.alerts.gpus_of", lambda trainer: [torch.device("cuda", 0)])
    alerts = Alerts(**{**NOTHING, "temperature": 85.0})
    alerts.setup(SimpleNamespace(callbacks=[alerts], is_global_zero=True), None, "fit")
    said = looked(alerts, [60, 86, 90, 85, None], lambda celsius: board.update(celsius=celsius))
    assert said == [
        ("WARNING", "Alert at step 20: the GPU has 86 degrees Celsius, above 85."),
        ("INFO", "Step 40: temperature has recovered."),
    ]


def test_a_run_is_told_of_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Listener, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the command: the disk is full from the start, and the webhook's address is nowhere in the run."""
    monkeypatch.setenv("LATHE_TEST_HOOK", f"http://127.0.0.1:{server.port}/hooks/hidden-word")
    words = (
        "callbacks=[default,alerts]",
        "callbacks.alerts.url=env:LATHE_TEST_HOOK",
        "callbacks.alerts.disk_free_gb=1e9",
    )
    cfg = new_run(tmp_path, *SMALL, *words, "callbacks.alerts.temperature=null", "callbacks.alerts.loss_rise=100")
    seen: list[int] = []
    on_batch = Alerts.on_train_batch_end
    monkeypatch.setattr(Alerts, "on_train_batch_end", lambda *args: (seen.append(1), on_batch(*args))[1])
    result = lathe.training.train.train(cfg)
    assert result["steps"] == 40
    assert 8 <= len(seen) < 40 * 0.6  # every fifth is logged; the others run several at once
    run = Path(cfg["paths"]["run_dir"])
    disk = [message for message in server.messages if message["kind"] == "disk"]
    assert [message["step"] for message in disk] == [5]
    assert disk[0]["run"] == str(run)
    assert (run / "run.log").read_text().count("WARNING lathe.contrib.alerts: Alert at step 5: the disk of the") == 1
    for path in run.rglob("*"):
        assert not path.is_file() or b"hidden-word" not in path.read_bytes()
    assert "hidden-word" not in capsys.readouterr().out


def test_an_address_is_hidden_from_loggers_and_a_strangers_is_not_posted_to() -> None:
    leaves = flatten({"callbacks": {"alerts": {"url": "https://host/hooks/secret", "timeout": 1.0}}})
    assert run_facts(leaves) == {"callbacks.alerts.url": "hidden", "callbacks.alerts.timeout": 1.0}
    node = {"_target_": "lathe.contrib.Alerts", "url": "https://host/hooks/secret"}
    (found,) = findings({"callbacks": {"alerts": node}}, [], {})
    assert (found.key, found.name) == ("callbacks.alerts.url", "https://host/hooks/secret")
    named = {"callbacks": {"alerts": {**node, "url": "env:LATHE_TEST_HOOK"}}}
    assert not list(findings(named, [], {}))


# the webhook, with a server on this machine

KEY = "callbacks.alerts.url"


def url(server: Listener, path: str = "hooks/secret") -> str:
    return f"http://127.0.0.1:{server.port}/{path}"


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
    hook.post({"text": "hot, 95 °C", "value": None})
    hook.close()
    assert (server.messages, server.paths) == ([{"text": "hot, 95 °C", "value": None}], ["/hooks/secret"])
    assert server.headers[0]["Content-Type"] == "application/json"
    for address in ("file:///etc/secret", "http://me:secret@host/", "http://host:port/secret", None):
        monkeypatch.setenv("LATHE_TEST_HOOK", address) if address else monkeypatch.delenv("LATHE_TEST_HOOK")
        with pytest.raises(UserError, match=rf"^{KEY}=env:LATHE_TEST_HOOK: ") as told:
            Webhook("env:LATHE_TEST_HOOK", 30)
        assert "secret" not in str(told.value)
