"""How long a report takes: python scripts/report.py over many small run directories, as a user waits for it.

    python benchmarks/bench_report.py --runs 1000

Writes the run directories into a temporary folder (widths x learning rates x ten seeds, 40 logged steps each), and runs
the command in processes of its own: without files, with tables, with the page as well. The bar: 5 s of the clock for
1,000 runs with tables.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lathe.config.resolve import resolve

ROOT = Path(__file__).resolve().parent.parent
SEEDS = 10
KINDS = {"printed": "[]", "tables": "[markdown,csv,latex]", "page": "[markdown,csv,latex,html]"}
WORDS = ["model=mlp", "trainer.max_epochs=2"]


def write_runs(log_dir: Path, count: int) -> None:
    """Write `count` complete run directories to logs/train in `log_dir`."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = resolve(compose("train", overrides=WORDS))
    environment = {"launch_id": None, "python": "3.11", "packages": {"torch": "2.13.0"}, "git_commit": "0" * 40}
    for number in range(count):
        seed, width, rate = number % SEEDS, 8 * (1 + number // SEEDS % 5), round(0.01 * (1 + number // SEEDS // 5), 2)
        cfg["seed"] = cfg["data"]["seed"] = seed
        cfg["model"]["net"]["width"], cfg["optimizer"]["lr"] = width, rate
        path = log_dir / "train" / f"2026-11-23_{number // 3600:02}-{number // 60 % 60:02}-{number % 60:02}_a1b2c3"
        path.mkdir(parents=True)
        words = [*WORDS, f"model.net.width={width}", f"optimizer.lr={rate}", f"seed={seed}"]
        value = 0.8 + width / 1000 - rate / 10 + (number * 7919 % 101) / 10_000
        _write(path, cfg, words, environment, value)


def _write(path: Path, cfg: dict[str, Any], words: list[str], environment: dict[str, Any], value: float) -> None:
    (path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(cfg)))
    (path / "overrides.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(words)))
    (path / "environment.json").write_text(json.dumps(environment))
    lines = [f"{step},{2 / step},{value if step % 10 == 0 else ''}" for step in range(1, 41)]
    (path / "metrics.csv").write_text("\n".join(["step,train/loss,val/accuracy", *lines, ""]))
    told = {"test/accuracy": value, "val/accuracy": value, "objective": value, "monitor": "val/accuracy"}
    (path / "result.json").write_text(json.dumps({**told, "seconds": 2.0, "parameters": 1000, "seed": cfg["seed"]}))


def seconds(folder: Path, formats: str) -> tuple[float, float]:
    """Return the wall and CPU seconds of one report."""
    words = [f"runs={folder / 'logs' / 'train'}", f"formats={formats}", f"output={folder / 'report'}"]
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(  # noqa: S603 - our own command
        [sys.executable, str(ROOT / "scripts" / "report.py"), *words], cwd=folder, check=True, capture_output=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="run directories (default 1000)")
    parser.add_argument("--rounds", type=int, default=3, help="reports of each kind, in turns (default 3)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_runs(Path(name) / "logs", options.runs)
        turns = [{kind: seconds(Path(name), formats) for kind, formats in KINDS.items()} for _ in range(options.rounds)]
    print(f"{options.runs} runs, {os.cpu_count()} cores, Python {platform.python_version()}, best of {options.rounds}")
    for kind in KINDS:
        clock, processor = (min(turn[kind][at] for turn in turns) for at in (0, 1))
        print(f"  {kind:8} {clock:6.2f} s, {processor:6.2f} s of the processor")
    if options.json:
        options.json.write_text(json.dumps({"runs": options.runs, "seconds": turns}, indent=2) + "\n")


if __name__ == "__main__":
    main()
