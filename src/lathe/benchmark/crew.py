"""Worker processes that measure cases in turns, so that a machine's drift affects all alike. No torch."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lathe.benchmark.cases import Case
from lathe.benchmark.suites import order
from lathe.files import scratch_prefix, write_atomically
from lathe.launch.devices import count_processes

LOOK = 0.002  # seconds between polls for a result


class Crew:
    """The processes of one launch, under the launcher of training. They wait for turns by polling a file."""

    def __init__(self, cases: dict[str, dict[str, Any]], processes: int, threads: int) -> None:
        self._turn = 0
        self.folder = Path(tempfile.mkdtemp(prefix=scratch_prefix()))
        cfg = dict(next(iter(cases.values()))["cfg"])  # the launcher reads trainer, launch and paths
        cfg["paths"] = {**cfg["paths"], "run_dir": str(self.folder)}
        for case in cases.values():
            case["cfg"]["paths"]["run_dir"] = str(self.folder)
        cfg["benchmark"] = {"folder": str(self.folder), "cases": cases}
        (self.folder / "job.json").write_text(json.dumps({"cfg": cfg, "processes": processes}))
        self._said = open(self.folder / "said", "w+")  # noqa: SIM115 - closed in `dismiss`
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-m", "lathe.benchmark.crew", str(self.folder / "job.json")]
        self._process = subprocess.Popen(command, env=environment, stdout=self._said, stderr=subprocess.STDOUT)  # noqa: S603

    def measure(self, name: str, timeout: float) -> dict[str, Any]:
        """Return the figures of a case, or `error` with a message; some errors end the processes (`alive`)."""
        write_atomically(self.folder / f"go-{self._turn}", name)
        done, deadline = self.folder / f"done-{self._turn}", time.monotonic() + timeout
        self._turn += 1
        while not done.exists():
            if self._process.poll() is not None:
                return {"error": f"its processes ended: {self._last_words()}"}
            if time.monotonic() > deadline:
                self.dismiss(keep=True)
                return {"error": f"no result within timeout={timeout} seconds"}
            time.sleep(LOOK)
        result: dict[str, Any] = json.loads(done.read_text())
        return result

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = [line.strip() for line in self._said.read().splitlines() if line.strip()]
        return lines[-1][:300] if lines else f"exit code {self._process.returncode}"

    def dismiss(self, keep: bool = False) -> None:
        """End the processes, and remove their folder unless `keep`."""
        if self.alive:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if not keep:
            self._said.close()
            shutil.rmtree(self.folder, ignore_errors=True)


def run(
    cases: Sequence[Case],
    composed: dict[str, dict[str, Any]],
    request: dict[str, Any],
    tell: Callable[[str], None],
    refused: Mapping[str, str] | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """Measure every case in every round, and return the figures of each case, round by round.

    `composed` are the resolved configurations, `refused` the messages of cases without one. `alone` cases get fresh
    processes in every turn; the others share processes that stay. A failed case is not tried again.
    """
    told = {case.name: [{"error": sentence}] for case in cases if (sentence := (refused or {}).get(case.name))}
    names = [case.name for case in cases]
    cases = [case for case in cases if case.name not in told]
    started = {case.name: count_processes(composed[case.name]) for case in cases}
    crew_of: dict[str, Any] = {case.name: case.name if case.alone else started[case.name] for case in cases}
    results: dict[str, list[dict[str, Any]]] = {name: told.get(name, []) for name in names}
    crews: dict[Any, Crew] = {}
    try:
        for number in range(request["rounds"]):
            for case in order(cases, number):
                if any("error" in result for result in results[case.name]):
                    continue
                patience = request["timeout"] * (1 + (request["epochs"] if case.train and number == 0 else 0))
                if case.kind == "compile":
                    result = _cold_and_warm(_ordered(case, composed, request), started[case.name], request)
                    results[case.name].append(result)
                    tell(f"{case.name}: {result.get('error') or _short(result)}")
                    continue
                key = crew_of[case.name]
                if key not in crews or not crews[key].alive:
                    mine = {
                        other.name: _ordered(other, composed, request) for other in cases if crew_of[other.name] == key
                    }
                    crews[key] = Crew(mine, started[case.name], request["threads"])
                result = crews[key].measure(case.name, patience)
                results[case.name].append(result)
                if "error" in result or number == 0:
                    tell(f"{case.name}: {result.get('error') or _short(result)}")
                if case.alone:
                    crews.pop(key).dismiss()
    finally:
        for crew in crews.values():
            crew.dismiss()
    return results


def _ordered(case: Case, composed: dict[str, dict[str, Any]], request: dict[str, Any]) -> dict[str, Any]:
    cfg = json.loads(json.dumps(composed[case.name]))
    forward = case.facts.get("method") == "plain"
    return {
        "cfg": cfg,
        "kind": case.kind,
        "sync": case.sync,
        "alone": case.alone,
        "forward": forward,
        "peak": case.peak,
        "epochs": request["epochs"] if case.train else 0,
        "warmup": request["warmup"],
        "steps": request["steps"],
    }


def _cold_and_warm(job: dict[str, Any], processes: int, request: dict[str, Any]) -> dict[str, Any]:
    """Run the job with an empty and a filled compile cache; add the compile times as `cold_s` and `warm_s`."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix=scratch_prefix(), ignore_cleanup_errors=True) as cache:
        for _ in ("cold", "warm"):
            crew = Crew({"this": {**json.loads(json.dumps(job)), "cache": cache}}, processes, request["threads"])
            try:
                found.append(crew.measure("this", request["timeout"]))
            finally:
                crew.dismiss()
            if "error" in found[-1]:
                return found[-1]
    return {**found[1], "cold_s": found[0]["compile_s"], "warm_s": found[1]["compile_s"]}


def _short(result: dict[str, Any]) -> str:
    if "cold_s" in result:
        return f"{result['cold_s']:.1f} s cold, {result['warm_s']:.1f} s warm, {result['step_ms']:.1f} ms"
    return f"{result['step_ms']:.1f} ms" if "step_ms" in result else f"{result['peak'] / 2**20:.1f} MiB at the peak"


if __name__ == "__main__":
    from lathe.launch.elastic import die_with_parent, run_job

    die_with_parent()
    job = json.loads(Path(sys.argv[1]).read_text())
    run_job("lathe.benchmark.rank:work", job["cfg"], job["processes"], job["cfg"]["launch"])
