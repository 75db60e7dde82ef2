"""Judge a change: train two sides with equal seeds, in turns, until a sequential test says which is better.

The command is `python scripts/judge.py`. Looking at the result after each pair would make an ordinary t test find
differences by chance; `evidence` stays valid however often one looks.
"""

import hashlib
import itertools
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lathe import files
from lathe.config.override_parsing import as_typed
from lathe.errors import UserError, require
from lathe.verbs.report.assemble import direction_of
from lathe.verbs.reproduce import project, run_to_end
from lathe.verbs.runs.reader import Run, find_runs

EXIT_CODES = {"better": 0, "worse": 3, "not told apart": 4}
SIDES = ("baseline", "candidate")
SPREAD = 1.0  # variance of the effect, in standard deviations of a pair's difference, that `evidence` expects
QUIET = ("trainer.enable_progress_bar=false", "trainer.enable_model_summary=false")


def evidence(differences: Sequence[float]) -> float:
    """Return the Bayes factor of an effect against none, for differences of pairs with unknown variance.

    The standardised effect has the prior N(0, SPREAD), the scale the prior 1 / sigma. Without an effect the factor ever
    exceeds 1 / risk with probability at most `risk`, whenever one stops: Perez-Ortiz et al. 2024, arXiv:2208.07610.
    """
    n, mean = len(differences), statistics.fmean(differences)
    explained, rest = n * mean**2, sum((value - mean) ** 2 for value in differences)
    if n < 2 or explained == 0:
        return 1.0
    shrunk = 1 + n * SPREAD
    return float(shrunk**-0.5 * ((rest + explained) / (rest + explained / shrunk)) ** (n / 2))


def verdict(differences: Sequence[float], risk: float) -> str | None:
    """Return better or worse for differences in which more is better; None while the evidence is too weak."""
    if evidence(differences) < 1 / risk:
        return None
    return "better" if statistics.fmean(differences) > 0 else "worse"


def judge(request: dict[str, Any]) -> int:
    """Print a line for each pair and the verdict as one line of JSON; return the exit code."""
    output, risk = request["output"], request["risk"]
    if output is not None:  # before training
        files.require_writable(Path(output).resolve().parent)
    sides = [Side(name, request) for name in SIDES]
    pairs: list[tuple[float, float]] = []
    outcome, direction = None, "max"
    fixed = [set(side.runs) for side in sides if not side.trains]
    seeds = sorted(set.intersection(*fixed)) if fixed else itertools.count(request["seed"])
    for seed in itertools.islice(seeds, request["budget"]):
        runs = [side.run(seed) for side in reversed(sides)][::-1]  # a mistake in the candidate costs no training
        metric = request["metric"] or runs[0].objective[0]
        direction = direction_of(metric, runs, request["direction"])
        pairs.append((_measured(runs[0], request["metric"]), _measured(runs[1], request["metric"])))
        differences = [(b - a) * (1 if direction == "max" else -1) for a, b in pairs]
        values = "baseline {:.6g}, candidate {:.6g}".format(*pairs[-1])
        progress = f"seed {seed}: {values}, evidence {evidence(differences):.3g} of {1 / risk:g}"
        print(progress, file=sys.stderr, flush=True)
        outcome = verdict(differences, risk)
        if outcome is not None:
            break
    require(bool(pairs), "baseline and candidate have no complete runs with equal seeds.")
    baseline, candidate = (statistics.fmean(values) for values in zip(*pairs, strict=True))
    answer = {
        "verdict": outcome or "not told apart",
        "metric": metric,
        "direction": direction,
        "pairs": len(pairs),
        "baseline": baseline,
        "candidate": candidate,
        "difference": candidate - baseline,
        "evidence": evidence(differences),
        "risk": risk,
    }
    if output is not None:
        files.write_atomically(files.followed(Path(output)), json.dumps(answer, indent=2) + "\n")
    print(json.dumps(answer), flush=True)
    return EXIT_CODES[str(answer["verdict"])]


def _measured(run: Run, metric: str | None) -> float:
    """Return the metric of a run, by default its objective."""
    name, objective = run.objective
    value = objective if metric in (None, name, "objective") else run.metrics.get(str(metric))
    if value is None:
        have = ", ".join(dict.fromkeys([name, *run.metrics]))
        raise UserError(f"metric={metric or name}: {run.label} has no such number; it has {have}.")
    return value


class Side:
    """One side of the comparison: finished runs, or overrides to train with."""

    def __init__(self, key: str, request: dict[str, Any]) -> None:
        typed = request[key]
        self.key, self.words = key, shlex.split(typed)
        self.trains = not typed or any("=" in word for word in self.words)
        if self.trains:
            reserved = [word for word in self.words if word.startswith(("seed=", "name=", "-"))]
            require(not reserved, f"{key}: {' '.join(reserved)} is set by judge.py; leave it out.")
            self.root = project("judge.py")
            self.log_dir = Path(request["paths"]["log_dir"]).absolute()
            # a folder for each list of overrides, whose complete runs a repeated command takes
            self.name = f"{request['name']}-{key}-{hashlib.sha256(repr(self.words).encode()).hexdigest()[:8]}"
            self.runs = self._trained()
        else:
            self.runs = _complete(find_runs(typed))
            require(bool(self.runs), f"{key}={typed}: none of its runs is complete.")

    def _trained(self) -> dict[Any, Run]:
        folder = self.log_dir / self.name
        return _complete(find_runs(str(folder))) if any(folder.glob("*/environment.json")) else {}

    def run(self, seed: int) -> Run:
        """Return the complete run with a seed, trained now if there is none yet."""
        if seed not in self.runs:
            overrides = [*self.words, *QUIET, f"name={self.name}", f"seed={seed}"]
            command = [str(self.root / "train.py"), *overrides, f"paths.log_dir={as_typed(str(self.log_dir))}"]
            code, errors = run_to_end(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            lines = errors.strip().splitlines() or [f"exit code {code}"]
            require(not code, f"{self.key}, seed {seed}: {lines[-1].removeprefix('Error: ')}")
            self.runs = self._trained()
        return self.runs[seed]


def _complete(runs: Sequence[Run]) -> dict[Any, Run]:
    """Return the complete runs by their seeds."""
    return {run.seed: run for run in runs if run.state == "complete"}
