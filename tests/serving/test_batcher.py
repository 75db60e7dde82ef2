"""The queue and its workers: batches, their order, deaths and hangs, and a worker's answers."""

import asyncio
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from lathe.errors import UserError
from lathe.serving.batcher import Batcher, compute, send
from lathe.serving.decode import BadRequest

Batch = list[np.ndarray]


class Crew:
    """Starts threads that answer as workers do. `compute(batch)` returns one answer per request, or None for a dead
    worker.
    """

    def __init__(self, compute: Callable[[Batch], list[Any] | None], refusals: list[str | None] | None = None) -> None:
        self.compute, self.refusals, self.started, self.batches = compute, refusals or [], 0, []  # type: ignore[var-annotated]

    def launch(self, index: int) -> tuple[Any, socket.socket]:
        ours, theirs = socket.socketpair()
        process = Worker()
        refusal = self.refusals.pop(0) if self.refusals else None
        self.started += 1
        threading.Thread(target=self._work, args=(theirs, process, refusal), daemon=True).start()
        return process, ours

    def _work(self, end: socket.socket, process: "Worker", refusal: str | None) -> None:
        with end, end.makefile("rb") as file, suppress(EOFError, OSError):
            send(end, [refusal])
            while True:
                batch = pickle.load(file)
                self.batches.append([len(inputs) for inputs in batch])
                answers = self.compute(batch)
                if answers is None:
                    break
                send(end, answers)
        process.end()


class Worker:
    """The attributes of a process that the batcher reads."""

    def __init__(self) -> None:
        self.sentinel, self._write = os.pipe()
        self.exitcode: int | None = None
        self.killed = False
        self._over = threading.Event()

    def end(self) -> None:
        if self.exitcode is None:
            self.exitcode = 0
            os.close(self._write)
            self._over.set()

    def kill(self) -> None:
        self.killed = True
        self.end()

    def join(self, timeout: float | None = None) -> None:
        self._over.wait(timeout)


def same(batch: Batch) -> list[Any]:
    return [inputs.astype(np.float32) for inputs in batch]


def sample(value: int, rows: int = 1) -> np.ndarray:
    return np.full((rows, 2), value, np.uint8)


def play(batcher: Batcher, scene: Callable[[Batcher], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        try:
            await batcher.start()
            await scene(batcher)
        finally:
            await batcher.stop()

    asyncio.run(asyncio.wait_for(whole(), 30))


async def refused(status: int, call: Coroutine[Any, Any, Any]) -> str:
    with pytest.raises(BadRequest) as caught:
        await call
    assert caught.value.status == status
    return caught.value.sentence


def test_everybody_gets_their_own_answer_in_batches(options: Callable[..., Any]) -> None:
    crew = Crew(same)

    async def scene(batcher: Batcher) -> None:
        found = await asyncio.gather(*(batcher.predict(sample(i, 1 + i % 3), 10) for i in range(100)))
        for i, logits in enumerate(found):
            assert logits.tolist() == [[i, i]] * (1 + i % 3)
        assert all(sum(rows) <= 8 for rows in crew.batches)
        assert sum(len(rows) for rows in crew.batches) == 100
        assert len(crew.batches) < 40  # 199 samples

    play(Batcher(crew.launch, options(max_batch_size=8)), scene)


def test_a_lone_client_is_not_held_up_but_several_are_gathered(options: Callable[..., Any]) -> None:
    crew = Crew(same)

    async def scene(batcher: Batcher) -> None:
        began = time.monotonic()
        for _ in range(5):
            await batcher.predict(sample(1), 10)
        assert time.monotonic() - began < 1
        crew.batches.clear()
        await asyncio.gather(*(batcher.predict(sample(i), 10) for i in range(4)))
        began = time.monotonic()
        late = asyncio.create_task(batcher.predict(sample(1), 10))
        await asyncio.sleep(0.1)
        await asyncio.gather(late, *(batcher.predict(sample(i), 10) for i in range(3)))
        assert time.monotonic() - began < 1  # as many as in the last batch: no wait for batch_timeout
        assert crew.batches == [[1, 1, 1, 1], [1, 1, 1, 1]]
        began = time.monotonic()
        await batcher.predict(sample(1), 10)  # once: the last batch held four
        assert 1 < time.monotonic() - began < 4
        await batcher.predict(sample(1), 10)
        assert time.monotonic() - began < 4

    play(Batcher(crew.launch, options(max_batch_size=8, batch_timeout=2.0)), scene)


def test_a_full_queue_refuses_all_but_the_urgent(options: Callable[..., Any]) -> None:
    go = threading.Event()

    def compute(batch: Batch) -> list[Any]:
        go.wait()
        return same(batch)

    async def scene(batcher: Batcher) -> None:
        first = asyncio.create_task(batcher.predict(sample(0), 10))
        await asyncio.sleep(0.2)
        waiting = [asyncio.create_task(batcher.predict(sample(i), 10)) for i in (1, 2)]
        await asyncio.sleep(0)
        assert "2 requests wait already" in await refused(503, batcher.predict(sample(3), 10))
        urgent = asyncio.create_task(batcher.predict(sample(9), 10, urgent=True))
        await asyncio.sleep(0)
        assert [int(request.inputs[0, 0]) for request in batcher.waiting] == [9, 1, 2]
        go.set()
        found = await asyncio.gather(first, *waiting, urgent)
        assert [logits[0, 0] for logits in found] == [0, 1, 2, 9]

    play(Batcher(Crew(compute).launch, options(max_batch_size=1, max_queue=2)), scene)


def test_requests_of_a_dead_worker_are_answered_by_another(options: Callable[..., Any]) -> None:
    deaths = [True, False]

    def compute(batch: Batch) -> list[Any] | None:
        return None if len(batch) > 1 and deaths.pop(0) else same(batch)

    crew = Crew(compute)

    async def scene(batcher: Batcher) -> None:
        await batcher.predict(sample(0), 10)
        found = await asyncio.gather(*(batcher.predict(sample(i), 10) for i in range(5)))
        assert [logits[0, 0] for logits in found] == [0, 1, 2, 3, 4]
        assert crew.batches == [[1], [1] * 5, *[[1]] * 5]
        assert crew.started == 2
        assert batcher.metrics.restarts._value.get() == 1

    play(Batcher(crew.launch, options()), scene)


def test_an_input_that_kills_two_workers_is_refused_alone(options: Callable[..., Any]) -> None:
    crew = Crew(lambda batch: None if any(inputs[0, 0] == 66 for inputs in batch) else same(batch))

    async def scene(batcher: Batcher) -> None:
        one, poison, *others = (asyncio.create_task(batcher.predict(sample(i), 10)) for i in (1, 66, 2, 3))
        assert "2 workers died with this input" in await refused(500, poison)
        assert [(await other)[0, 0] for other in (one, *others)] == [1, 2, 3]
        assert crew.started == 3

    play(Batcher(crew.launch, options()), scene)


def test_a_hung_worker_is_killed_and_replaced(options: Callable[..., Any]) -> None:
    hang = threading.Event()

    def compute(batch: Batch) -> list[Any]:
        if batch[0][0, 0] == 66:
            hang.wait(20)
        return same(batch)

    crew = Crew(compute)

    async def scene(batcher: Batcher) -> None:
        assert "within 0.5 seconds" in await refused(504, batcher.predict(sample(66), 0.5))
        assert (await batcher.predict(sample(7), 10))[0, 0] == 7
        assert crew.started == 2
        hang.set()

    play(Batcher(crew.launch, options(max_batch_size=1, request_timeout=0.5)), scene)


def test_who_gave_up_is_not_computed(options: Callable[..., Any]) -> None:
    go = threading.Event()

    def compute(batch: Batch) -> list[Any]:
        go.wait()
        return same(batch)

    crew = Crew(compute)

    async def scene(batcher: Batcher) -> None:
        first = asyncio.create_task(batcher.predict(sample(0), 10))
        await asyncio.sleep(0.2)
        await refused(504, batcher.predict(sample(1), 0.05))
        assert len(batcher.waiting) == 0
        go.set()
        await first
        assert (await batcher.predict(sample(2), 10))[0, 0] == 2
        assert crew.batches == [[1], [1]]

    play(Batcher(crew.launch, options(max_batch_size=1)), scene)


def test_a_net_that_cant_be_loaded_is_one_sentence(options: Callable[..., Any]) -> None:
    crew = Crew(same, refusals=["the file is gone: export again."])
    with pytest.raises(UserError, match="the file is gone: export again"):
        play(Batcher(crew.launch, options()), lambda batcher: asyncio.sleep(0))
    assert crew.started == 1


def test_stopping_answers_waiting_requests(options: Callable[..., Any]) -> None:
    go = threading.Event()

    def compute(batch: Batch) -> list[Any]:
        go.wait(20)
        return same(batch)

    crew = Crew(compute)

    async def scene() -> None:
        batcher = Batcher(crew.launch, options(max_batch_size=1))
        await batcher.start()
        calls = [asyncio.create_task(batcher.predict(sample(i), 10)) for i in range(3)]
        await asyncio.sleep(0.2)
        asyncio.get_running_loop().call_later(0.2, go.set)
        await batcher.stop()
        for call in calls:
            assert "stopping" in await refused(503, call)

    asyncio.run(asyncio.wait_for(scene(), 30))


def sums(x: np.ndarray) -> np.ndarray:
    """Return sum and first pixel of each image; raise for images with a 13."""
    if (x == 13).any():
        raise ValueError("unlucky")
    return np.stack([x.sum(axis=(1, 2, 3)), x[:, 0, 0, 0]], axis=1)


def test_requests_are_computed_together_and_get_their_own_rows() -> None:
    sizes: list[int] = []

    def counted(x: np.ndarray) -> np.ndarray:
        sizes.append(len(x))
        return sums(x)

    inputs = [np.full((rows, 1, 2, 2), rows, np.uint8) for rows in (1, 3, 2)]
    found = compute(counted, inputs)
    assert sizes == [6]
    assert [part.tolist() for part in found] == [[[4.0, 1.0]], [[12.0, 3.0]] * 3, [[8.0, 2.0]] * 2]
    assert all(part.dtype == np.float32 for part in found)


def test_other_shapes_are_computed_apart() -> None:
    inputs = [np.ones((1, 1, 2, 2), np.uint8), np.ones((1, 1, 4, 4), np.uint8), np.ones((2, 1, 2, 2), np.uint8)]
    assert [part[:, 0].tolist() for part in compute(sums, inputs)] == [[4.0], [16.0], [4.0, 4.0]]


def test_an_input_that_the_net_cant_take_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    inputs = [np.full((1, 1, 2, 2), value, np.uint8) for value in (1, 13, 2)]
    found = compute(sums, inputs)
    assert found[1] is None
    assert [found[0].tolist(), found[2].tolist()] == [[[4.0, 1.0]], [[8.0, 2.0]]]
    assert "unlucky" in caplog.text
