"""Synthetic data of the report's page: sweeps of any size with known answers."""

import math
import random
from typing import Any

HOSTILE = "</script><img src=x onerror=alert(1)>\"'<b>&amp;"
STATES = ("complete", "pruned", "running", "unfinished", "failed")


def run(index: int, points: int = 100, **other: Any) -> dict[str, Any]:
    """Return a run of a sweep; accuracy grows with depth, and is best at lr 0.1."""
    draw = random.Random(index)
    depth, lr, flip = (20, 32, 56)[index % 3], 10 ** draw.uniform(-3, 0), bool(index // 3 % 2)
    top = 0.9 + 0.0008 * depth - 0.02 * (math.log10(lr) + 1) ** 2 + draw.gauss(0, 0.004)
    steps = [10 * (i + 1) for i in range(points)]

    def grows(end: float, start: float) -> list[float]:
        return [end + (start - end) * math.exp(-i / 18) + draw.gauss(0, 0.006) for i in range(points)]

    made = {
        "path": f"logs/resnet/2026-11-20_12-{index // 60:02d}-{index % 60:02d}_{index:06x}",
        "name": "resnet",
        "state": "complete",
        "group": index % 3 * 2 + flip,
        "seed": index // 6,
        "fold": None,
        "factors": {"model.net.depth": depth, "optimizer.lr": lr, "data.augment.flip": flip},
        "metrics": {"test/accuracy": top, "test/loss": 1.02 - top, "val/accuracy": top + 0.004},
        "seconds": 40.0 + 3 * depth + draw.random(),
        "parameters": 13_000 * depth,
        "cost": {"bytes": 52_000 * depth, "macs": 2_000_000 * depth, "latency_ms": 0.12 * depth + draw.gauss(0, 0.2)},
        "curves": {
            "val/accuracy": [steps, grows(top, 0.3)],
            "val/loss": [steps, grows(1.02 - top, 2.3)],
            "train/loss": [steps, grows(0.9 - top, 2.4)],
            "train/accuracy": [steps, grows(top + 0.03, 0.3)],
        },
        "diff": {"model.net.depth": depth, "optimizer.lr": lr, "seed": index // 6},
        "command": f"python train.py data=cifar10 model=resnet20 model.net.depth={depth} optimizer.lr={lr:.4g}",
        "environment": {"python": "3.11.2", "torch": "2.13.0", "gpu": "none", "commit": "87ce878 with changes"},
        "receipt": None,
        "samples": None,
        "sentence": None,
    }
    return {**made, **other}


def ended(made: dict[str, Any], state: str) -> dict[str, Any]:
    """Return the same run in a state without a result."""
    sentence = "optimizer.lr=… made the loss nan at step 310." if state == "failed" else None
    return {**made, "state": state, "metrics": {}, "group": None, "parameters": None, "sentence": sentence}


def report(count: int, **other: Any) -> dict[str, Any]:
    """Return `count` runs; if more than ten, every tenth has no result."""
    runs = [run(index) for index in range(count)]
    if count > 10:
        runs = [ended(one, STATES[1 + i // 10 % 4]) if i % 10 == 9 else one for i, one in enumerate(runs)]
    states = [one["state"] for one in runs]
    groups = [_group(index, [one for one in runs if one["group"] == index]) for index in range(min(6, count))]
    made = {
        "title": "Depth of a ResNet on CIFAR-10",
        "metric": "test/accuracy",
        "metrics": ["test/accuracy", "test/loss", "val/accuracy"],
        "direction": "max",
        "factors": ["model.net.depth", "optimizer.lr", "data.augment.flip"] if count > 1 else [],
        "created": "2026-11-23T10:43:42+00:00",
        "lathe": "0.1.0",
        "counts": {state: states.count(state) for state in STATES},
        "marks": ["3 runs were made by another commit (5f1c0de) than the others."] if count > 10 else [],
        "runs": runs,
        "groups": groups,
        "pairs": [_pair(a, groups) for a in range(1, len(groups))] if count > 10 else [],
    }
    return {**made, **other}


def _group(index: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    values = [one["metrics"]["test/accuracy"] for one in runs]
    n, mean = len(values), sum(values) / max(1, len(values))
    std = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1)) if n > 1 else None
    half = None if std is None else 2.1 * std / math.sqrt(n)
    first = runs[0] if runs else run(index)
    factors = {key: first["factors"][key] for key in ("model.net.depth", "data.augment.flip")}
    return {
        "label": ", ".join(f"{key.rpartition('.')[2]}={value}".lower() for key, value in factors.items()),
        "factors": factors,
        "n": n,
        "mean": mean,
        "std": std,
        "interval": None if half is None else [mean - half, mean + half],
        "why": None if half is not None else "one run has no interval",
        "best": max(values, default=None),
        "seconds": sum(one["seconds"] for one in runs) / max(1, n),
        "parameters": first["parameters"],
        "command": first["command"] + " seed=0,1,2",
        "marks": ["two versions of the code"] if index == 4 else [],
    }


def _pair(a: int, groups: list[dict[str, Any]]) -> dict[str, Any]:
    difference = groups[a]["mean"] - groups[0]["mean"]
    return {
        "a": a,
        "b": 0,
        "n": min(groups[a]["n"], groups[0]["n"]),
        "difference": difference,
        "interval": [difference - 0.002, difference + 0.002],
        "p": 0.01,
        "says": "5 pairs: the interval is wide; evidence of a difference",
    }
