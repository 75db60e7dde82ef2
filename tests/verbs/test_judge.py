"""scripts/judge.py: which of two sides is better, by pairs of runs with equal seeds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import run
from support.run_directories import write_run
from support.runs import SMALL

from lathe.verbs.judge import evidence, judge, verdict

BASELINE = [0.90, 0.91, 0.89, 0.905, 0.895, 0.90, 0.91, 0.89, 0.90, 0.905]
GAINS = [0.02, 0.021, 0.019, 0.02, 0.022, 0.018, 0.02, 0.02, 0.02, 0.02]


def request(log_dir: Path, **other: Any) -> dict[str, Any]:
    sides = {side: str(log_dir / side) for side in ("baseline", "candidate")}
    plain = {"metric": "test/accuracy", "direction": None, "budget": 20, "risk": 0.02, "seed": 1, "name": "judge"}
    return {**sides, **plain, "output": None, "paths": {"log_dir": str(log_dir)}, **other}


def write_sides(log_dir: Path, gains: list[float]) -> None:
    for seed, (accuracy, gain) in enumerate(zip(BASELINE, gains, strict=True)):
        write_run(log_dir, seed, accuracy, ["name=baseline"], seed)
        write_run(log_dir, seed, accuracy + gain, ["name=candidate"], seed)


@pytest.mark.parametrize(
    ("gains", "code", "said"),
    [
        (GAINS, 0, "better"),
        ([-gain for gain in GAINS], 3, "worse"),
        ([0.02, -0.021, 0.019, -0.02, 0.022, -0.018, 0.02, -0.02, 0.02, -0.02], 4, "not told apart"),
        ([0.0] * 10, 4, "not told apart"),
    ],
)
def test_the_verdict_on_finished_runs(
    gains: list[float], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sides(tmp_path, gains)
    assert judge(request(tmp_path, metric="test/loss")) == code  # 1 - accuracy: lower is better
    assert judge(request(tmp_path)) == code
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["verdict"] == said
    assert answer["pairs"] == (6 if code != 4 else 10)
    used = gains[: answer["pairs"]]
    assert answer["difference"] == pytest.approx(np.mean(used))
    assert answer["evidence"] == pytest.approx(evidence(used if code != 3 else [-gain for gain in used]))


def test_pairs_have_equal_seeds(tmp_path: Path) -> None:
    """One side has more seeds, and in another order: only those of both count."""
    for seed in range(10):
        write_run(tmp_path, 10 - seed, 0.9 + seed / 1000, ["name=baseline"], seed)
    for seed in range(3, 7):
        write_run(tmp_path, seed, 0.91 + seed / 1000, ["name=candidate"], seed)
    output = tmp_path / "verdict.json"
    assert judge(request(tmp_path, output=str(output))) == 4
    answer = json.loads(output.read_text())
    assert (answer["pairs"], answer["difference"]) == (4, pytest.approx(0.01))


def test_evidence_is_the_bayes_factor_of_a_t_statistic() -> None:
    """Against the integral over the effect, by the noncentral t distribution."""
    from scipy import integrate, stats

    values = [0.3, 0.5, -0.1, 0.4, 0.6]
    n, t = len(values), stats.ttest_1samp(values, 0.0).statistic

    def likelihood(effect: float) -> float:
        return float(stats.nct.pdf(t, n - 1, effect * n**0.5) * stats.norm.pdf(effect))

    expected = integrate.quad(likelihood, -8, 8)[0] / stats.t.pdf(t, n - 1)
    assert evidence(values) == pytest.approx(expected, rel=1e-6)


def test_looking_after_each_pair_does_not_find_what_is_not_there() -> None:
    """Of 2,000 changes without an effect at most the promised share is ever told apart."""
    draws = np.random.default_rng(0).normal(size=(2000, 20))
    found = [any(verdict(row[:n].tolist(), 0.05) for n in range(2, 21)) for row in draws]
    assert np.mean(found) <= 0.05


@pytest.mark.slow
def test_a_side_is_trained_and_taken_again(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path, seed, 0.9, ["name=baseline"], seed)
    candidate = " ".join([*SMALL, "optimizer.lr=1e-6", "trainer.max_epochs=1"])
    words = (f"baseline={tmp_path}/baseline", f"candidate={candidate}", "budget=2", f"paths.log_dir={tmp_path}")
    for _ in range(2):  # the second time the runs are there
        done = run(*words, cwd=tmp_path, script="scripts/judge.py")
        assert done.returncode == 4, done.stderr
        answer = json.loads(done.stdout)
        assert (answer["pairs"], answer["metric"], answer["baseline"]) == (2, "val/accuracy", pytest.approx(0.91))
        assert answer["difference"] < 0
        results = [json.loads(path.read_text()) for path in tmp_path.glob("judge-candidate-*/2*/result.json")]
        assert len(results) == 2
        assert answer["candidate"] == pytest.approx(sum(result["objective"] for result in results) / 2)
