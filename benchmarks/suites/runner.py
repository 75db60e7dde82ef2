"""Measures cases in turns, so that a machine's drift affects all alike: in processes of a launch, or in this process.

Run as a module, it is a launch: `python -m suites.runner job.json`. Imports no torch.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lathe.files import scratch_prefix, write_atomically
from lathe.launch.devices import count_processes
from suites.cases import Case
from suites.results import Results

POLL = 0.002  # seconds between looks for a result
T = TypeVar("T")


def rotate(items: Sequence[T], round_number: int) -> list[T]:
    """Return the items of a round, which begins with another one each time: none always follows the same one."""
    start = round_number % len(items)
    return [*items[start:], *items[:start]]


def take_turns(sides: Mapping[str, Callable[[], dict[str, Any]]], rounds: int, quiet: bool = False) -> Results:
    """Call the sides in turns in this process, and return their results. A side that fails has no further turn."""
    from lathe.receipt.measured import reason  # which imports torch

    results = Results({name: [] for name in sides})
    for number in range(rounds):
        for name in rotate([*sides], number):
            if any("error" in result for result in results[name]):
                continue
            try:
                results[name].append(sides[name]())
            except Exception as error:  # one failing side, such as without a compiler, must not hide the others
                results[name].append({"error": reason(error)})
                report(f"{name}: {results[name][-1]['error']}", quiet)
        report(f"round {number + 1} of {rounds}", quiet)
    return results


def report(text: str, quiet: bool = False) -> None:
    """Print a line of progress."""
    if not quiet:
        print(text, flush=True)


class Workers:
    """The processes of one launch, under the launcher of training. They wait for turns by polling a file."""

    def __init__(self, jobs: dict[str, dict[str, Any]], processes: int, threads: int) -> None:
        self._turn = 0
        self.folder = Path(tempfile.mkdtemp(prefix=scratch_prefix()))
        for job in jobs.values():
            job["cfg"]["paths"]["run_dir"] = str(self.folder)
        cfg = dict(next(iter(jobs.values()))["cfg"])  # the launcher reads trainer, launch and paths
        cfg["benchmark"] = {"folder": str(self.folder), "jobs": jobs}
        (self.folder / "job.json").write_text(json.dumps({"cfg": cfg, "processes": processes}))
        self._output = open(self.folder / "output", "w+")  # noqa: SIM115 - closed in `dismiss`
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}
        command = [sys.executable, "-m", "suites.runner", str(self.folder / "job.json")]
        self._process = subprocess.Popen(command, env=environment, stdout=self._output, stderr=subprocess.STDOUT)  # noqa: S603

    def measure(self, name: str, timeout: float) -> dict[str, Any]:
        """Return the figures of a case, or `error` with a message; some errors end the processes (`alive`)."""
        write_atomically(self.folder / f"go-{self._turn}", name)
        done, deadline = self.folder / f"done-{self._turn}", time.monotonic() + timeout
        self._turn += 1
        while not done.exists():
            if not self.alive:
                return {"error": f"its processes ended: {self._last_line()}"}
            if time.monotonic() > deadline:
                self.dismiss()
                return {"error": f"no result within timeout={timeout} seconds"}
            time.sleep(POLL)
        return dict(json.loads(done.read_text()))

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def _last_line(self) -> str:
        self._output.seek(0)
        lines = [line.strip() for line in self._output.read().splitlines() if line.strip()]
        return lines[-1][:300] if lines else f"exit code {self._process.returncode}"

    def dismiss(self) -> None:
        """End the processes, and remove their folder."""
        if self.alive:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._output.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def run(
    cases: Sequence[Case],
    composed: Mapping[str, dict[str, Any]],
    request: Mapping[str, Any],
    refused: Mapping[str, str] | None = None,
) -> Results:
    """Measure every case in every round, and return the figures of each.

    `composed` are the resolved configurations, `refused` the messages of cases without one. `fresh` cases get fresh
    processes in every turn; the others share processes that stay. A failed case is not tried again.
    """
    refused = refused or {}
    results = Results({case.name: [{"error": refused[case.name]}] if case.name in refused else [] for case in cases})
    cases = [case for case in cases if case.name not in refused]
    started = {case.name: count_processes(composed[case.name]) for case in cases}
    key_of: dict[str, Any] = {case.name: case.name if case.fresh else started[case.name] for case in cases}
    workers: dict[Any, Workers] = {}
    try:
        for number in range(request["rounds"]):
            for case in rotate(cases, number):
                name, key = case.name, key_of[case.name]
                if any("error" in result for result in results[name]):
                    continue
                if case.kind == "compile":
                    result = _cold_and_warm(case, composed[name], started[name], request)
                else:
                    if key in workers and not workers[key].alive:
                        workers.pop(key).dismiss()
                    if key not in workers:
                        jobs = {c.name: _job(c, composed[c.name], request) for c in cases if key_of[c.name] == key}
                        workers[key] = Workers(jobs, started[name], request["threads"])
                    epochs = request["epochs"] if case.train and number == 0 else 0
                    result = workers[key].measure(name, request["timeout"] * (1 + epochs))
                    if case.fresh:
                        workers.pop(key).dismiss()
                results[name].append(result)
                if "error" in result or number == 0:
                    report(f"{name}: {result.get('error') or _summary(result)}")
    finally:
        for group in workers.values():
            group.dismiss()
    return results


def _job(case: Case, cfg: dict[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """Return what suites.worker measures for a case."""
    return {
        "cfg": json.loads(json.dumps(cfg)),
        "kind": case.kind,
        "sync": case.sync,
        "fresh": case.fresh,
        "forward": case.facts.get("method") == "plain",
        "peak": case.peak,
        "epochs": request["epochs"] if case.train else 0,
        "warmup": request["warmup"],
        "steps": request["steps"],
    }


def _cold_and_warm(case: Case, cfg: dict[str, Any], processes: int, request: Mapping[str, Any]) -> dict[str, Any]:
    """Measure with an empty and with a filled compile cache; add the compile times as `cold_s` and `warm_s`."""
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix=scratch_prefix(), ignore_cleanup_errors=True) as cache:
        for _ in ("cold", "warm"):
            workers = Workers({"this": {**_job(case, cfg, request), "cache": cache}}, processes, request["threads"])
            try:
                results.append(workers.measure("this", request["timeout"]))
            finally:
                workers.dismiss()
            if "error" in results[-1]:
                return results[-1]
    return {**results[1], "cold_s": results[0]["compile_s"], "warm_s": results[1]["compile_s"]}


def _summary(result: Mapping[str, Any]) -> str:
    if "cold_s" in result:
        return f"{result['cold_s']:.1f} s cold, {result['warm_s']:.1f} s warm, {result['step_ms']:.1f} ms"
    return f"{result['step_ms']:.1f} ms" if "step_ms" in result else f"{result['peak'] / 2**20:.1f} MiB at the peak"


if __name__ == "__main__":
    from lathe.launch.elastic import die_with_parent, run_job

    die_with_parent()
    job = json.loads(Path(sys.argv[1]).read_text())
    run_job("suites.worker:work", job["cfg"], job["processes"], job["cfg"]["launch"])
