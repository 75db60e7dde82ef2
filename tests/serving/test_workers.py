"""Workers that are killed or hang, and servers that are stopped: all clients get an answer."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.server_process import BINARY, Answer, Served, alive, ask, message

pytestmark = pytest.mark.slow


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_killed_worker_under_load(served_run: Path, bare: Callable[..., np.ndarray], digits: np.ndarray) -> None:
    logits = bare(digits)
    over = threading.Event()
    found: list[int] = []

    def client(start: int) -> None:
        with server.connect() as connection:
            number = start
            while not over.is_set():
                number = (number + 7) % 512
                answer = ask(
                    connection,
                    message("POST", "/predict", digits[number].tobytes(), content_type=BINARY, accept=BINARY),
                )
                found.append(answer.status)
                if answer.status == 200:
                    np.testing.assert_allclose(np.frombuffer(answer.body, "<f4"), logits[number], rtol=1e-4, atol=1e-4)
                else:
                    assert answer.status == 503
                    assert "died" in answer.sentence
                    assert answer.headers["retry-after"] == "1"

    with Served(served_run, "target=onnx", "threads=1", "workers=2") as server, ThreadPoolExecutor(16) as pool:
        clients = [pool.submit(client, start) for start in range(16)]
        try:
            for kill in range(4):
                time.sleep(1)
                workers = server.workers()
                os.kill(workers[kill % len(workers)], signal.SIGKILL)
                restarted = ("lathe_worker_restarts_total", kill + 1), ("lathe_workers", 2)
                wait_for(lambda expected=restarted: all(server.metric(name) == value for name, value in expected))
        finally:
            over.set()
        for future in clients:
            future.result(timeout=60)  # no client hangs or gets another's answer
        assert found.count(200) > 100
        assert len(server.workers()) == 2
        code, error = server.stop()
        assert code == 0
        assert error.count("died, exit code -9: starting another.") == 4
        assert "Traceback" not in error


def test_a_hung_worker_and_a_full_queue(served_run: Path) -> None:
    with Served(
        served_run,
        "target=onnx",
        "threads=1",
        "request_timeout=4",
        "health_timeout=2",
        "max_queue=3",
        "max_batch_size=1",
    ) as server:
        (worker,) = server.workers()
        os.kill(worker, signal.SIGSTOP)
        with ThreadPoolExecutor(8) as pool:

            def one(_: int) -> Answer:
                return server.ask("POST", "/predict", bytes(64), content_type=BINARY)

            first = pool.submit(one, 0)
            time.sleep(0.5)  # the worker has it; three fit into the queue
            answers = [*pool.map(one, range(7)), first.result()]
            statuses = sorted(answer.status for answer in answers)
            assert statuses == [503] * 4 + [504] * 4  # the one with the worker and the three in the queue timed out
            for answer in answers:
                assert "wait already" in answer.sentence or "no answer within" in answer.sentence
        wait_for(lambda: server.ask("GET", "/health").status == 200)
        assert not alive(worker)
        assert server.metric("lathe_queue") == 0
        assert "hung and was killed" in server.stop()[1]


def test_health_fails_with_its_worker(served_run: Path) -> None:
    with Served(served_run, "target=onnx", "threads=1", "health_timeout=1") as server:
        (worker,) = server.workers()
        os.kill(worker, signal.SIGSTOP)
        began = time.monotonic()
        found = server.ask("GET", "/health")
        assert found.status == 503
        assert "A prediction failed" in found.sentence
        assert time.monotonic() - began < 10
        os.kill(worker, signal.SIGCONT)
        wait_for(lambda: server.ask("GET", "/health").status == 200)


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_stop_answers_what_was_accepted(
    served_run: Path, digits: np.ndarray, bare: Callable[..., np.ndarray], everywhere: bool
) -> None:
    """Also if the signal reaches the workers, as from a terminal."""
    with Served(served_run, "target=onnx", "threads=1", "max_batch_size=4") as server, ThreadPoolExecutor(12) as pool:
        (worker,) = server.workers()
        os.kill(worker, signal.SIGSTOP)
        calls = [
            pool.submit(server.ask, "POST", "/predict", digits[i].tobytes(), content_type=BINARY, accept=BINARY)
            for i in range(12)
        ]
        wait_for(lambda: server.metric("lathe_queue") >= 8)
        time.sleep(0.5)  # the last of the twelve may still be in transit
        number = signal.SIGINT if everywhere else signal.SIGTERM
        if everywhere:
            os.kill(worker, number)
        server.process.send_signal(number)
        time.sleep(0.5)
        with pytest.raises(OSError, match="refused"):
            server.connect()
        os.kill(worker, signal.SIGCONT)
        for i, call in enumerate(calls):
            found = call.result(timeout=60)
            assert found.status == 200
            np.testing.assert_allclose(
                np.frombuffer(found.body, "<f4"), bare(digits[i : i + 1])[0], rtol=1e-4, atol=1e-4
            )
        server.process.communicate(timeout=60)
        assert server.process.returncode == 0
        assert not alive(worker)


def test_a_net_that_takes_too_long_to_load_ends_the_server(served_run: Path) -> None:
    with pytest.raises(AssertionError, match=r"load_timeout=0\.01"):
        Served(served_run, "target=onnx", "threads=1", "load_timeout=0.01")


def test_workers_leave_when_the_server_is_killed(served_run: Path) -> None:
    server = Served(served_run, "target=onnx", "threads=1", "workers=2")
    workers = server.workers()
    assert len(workers) == 2
    server.process.kill()
    server.process.communicate()
    wait_for(lambda: not any(alive(worker) for worker in workers))


def test_the_module_is_served_too(served_run: Path, bare: Callable[..., np.ndarray], digits: np.ndarray) -> None:
    with Served(served_run, "target=module", "threads=1") as server:
        assert json.loads(server.ask("GET", "/info").body)["manifest"]["target"] == "module"
        found = server.ask("POST", "/predict", digits[:4].tobytes(), content_type=BINARY, accept=BINARY)
        np.testing.assert_allclose(
            np.frombuffer(found.body, "<f4").reshape(4, 10), bare(digits[:4]), rtol=1e-4, atol=1e-4
        )
