"""How often scripts/judge.py is right: synthetic changes with a known effect.

    python benchmarks/bench_judge.py --rounds 50

A round is 100 changes, 10 better, 20 worse and 70 without an effect, each judged by up to 20 pairs of equal seeds. The
effect is 1.5 standard deviations of a pair's difference. The noise is normal, heavy-tailed (Student's t with 4 degrees
of freedom), or an accuracy over 297 images. Bars: of those called better at most 5 % are none, and 8 of 10 are found.
"""

import numpy as np
from common import parser, verdict
from suites.results import table

from lathe.verbs.judge import verdict as judged

BUDGET, RISK, EFFECT, IMAGES = 20, 0.02, 1.5, 297
CHANGES = {"better": 10, "worse": 20, "none": 70}
SIGNS = {"better": 1, "worse": -1, "none": 0}


def differences(kind: str, noise: str, draws: np.random.Generator) -> np.ndarray:
    """Return the differences of a change, whose standard deviation is about 1."""
    effect = SIGNS[kind] * EFFECT
    if noise == "normal":
        return draws.normal(effect, 1, BUDGET)
    if noise == "heavy tails":
        return effect + draws.standard_t(4, BUDGET) / 2**0.5
    rates = np.array([0.97, 0.97 + effect * (2 * 0.97 * 0.03 / IMAGES) ** 0.5])
    baseline, candidate = draws.binomial(IMAGES, rates.clip(0, 1), (BUDGET, 2)).T
    return (candidate - baseline) / IMAGES


def judge(values: np.ndarray) -> tuple[str | None, int]:
    """Return the verdict and the number of pairs that it took."""
    for pairs in range(2, BUDGET + 1):
        answer = judged(values[:pairs].tolist(), RISK)
        if answer is not None:
            return answer, pairs
    return None, BUDGET


def main() -> None:
    options = parser(__doc__, rounds=50).parse_args()
    rows = []
    for noise in ("normal", "heavy tails", "accuracy"):
        draws = np.random.default_rng(0)
        answers = [
            (kind, *judge(differences(kind, noise, draws)))
            for _ in range(options.rounds)
            for kind, count in CHANGES.items()
            for _ in range(count)
        ]
        called_better = [kind for kind, answer, _ in answers if answer == "better"]
        wrong = sum(kind != "better" for kind in called_better) / max(1, len(called_better))
        share = called_better.count("better") / (CHANGES["better"] * options.rounds)
        pairs = [used for kind, answer, used in answers if kind == "better" and answer]
        spread = f"{np.median(pairs):.0f} ({min(pairs)} to {max(pairs)})"
        rows.append([noise, f"{wrong:.3f}", f"{share:.2f}", spread, verdict(wrong <= 0.05 and share >= 0.8)])
    print(table(["noise", "kept that are none", "better found", "pairs until better", "bars"], rows))


if __name__ == "__main__":
    main()
