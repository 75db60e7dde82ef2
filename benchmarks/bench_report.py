"""Seconds that `python scripts/report.py` takes for many small runs.

    python benchmarks/bench_report.py --runs 1000

Writes the run directories into a temporary folder (widths x learning rates x ten seeds, 40 logged steps each), and runs
the command in turns: without files, with tables, with tables and the page. The bar: 5 s wall-clock for 1,000 runs with
tables.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, cpu_seconds, describe_machine, parser, run_timed, write_json
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from suites.results import Spread

from lathe.config.resolve import resolve

SEEDS = 10
KINDS = {"printed": "[]", "tables": "[markdown,csv,latex]", "page": "[markdown,csv,latex,html]"}
WORDS = ["model=mlp", "trainer.max_epochs=2"]


def write_runs(log_dir: Path, count: int) -> None:
    """Write `count` complete run directories to the folder `train` in `log_dir`."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = resolve(compose("train", overrides=WORDS))
    for number in range(count):
        seed, width, rate = number % SEEDS, 8 * (1 + number // SEEDS % 5), round(0.01 * (1 + number // SEEDS // 5), 2)
        cfg["seed"] = cfg["data"]["seed"] = seed
        cfg["model"]["net"]["width"], cfg["optimizer"]["lr"] = width, rate
        path = log_dir / "train" / f"2026-11-23_{number // 3600:02}-{number // 60 % 60:02}-{number % 60:02}_a1b2c3"
        path.mkdir(parents=True)
        words = [*WORDS, f"model.net.width={width}", f"optimizer.lr={rate}", f"seed={seed}"]
        _write_run(path, cfg, words, 0.8 + width / 1000 - rate / 10 + (number * 7919 % 101) / 10_000)


def _write_run(path: Path, cfg: dict[str, Any], words: list[str], value: float) -> None:
    environment = {"launch_id": None, "python": "3.11", "packages": {"torch": "2.13.0"}, "git_commit": "0" * 40}
    (path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(cfg)))
    (path / "overrides.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(words)))
    (path / "environment.json").write_text(json.dumps(environment))
    lines = [f"{step},{2 / step},{value if step % 10 == 0 else ''}" for step in range(1, 41)]
    (path / "metrics.csv").write_text("\n".join(["step,train/loss,val/accuracy", *lines, ""]))
    result = {"test/accuracy": value, "val/accuracy": value, "objective": value, "monitor": "val/accuracy"}
    (path / "result.json").write_text(json.dumps({**result, "seconds": 2.0, "parameters": 1000, "seed": cfg["seed"]}))


def main() -> None:
    made = parser(__doc__, rounds=3)
    made.add_argument("--runs", type=int, default=1000, help="run directories (default 1000)")
    made.add_argument("--json", type=Path, help="also write the figures to this file")
    options = made.parse_args()
    wall: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cpu: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_runs(folder / "logs", options.runs)
        words = (f"runs={folder / 'logs' / 'train'}", f"output={folder / 'report'}")
        for _ in range(options.rounds):
            for kind, formats in KINDS.items():
                before = cpu_seconds()
                wall[kind].append(run_timed("scripts/report.py", *words, f"formats={formats}", cwd=folder))
                cpu[kind].append(cpu_seconds() - before)
    print(f"{options.runs} runs; {describe_machine('torch', 'lightning')}; n = {options.rounds}")
    for kind in KINDS:
        print(f"  {kind:8} {Spread(wall[kind]):.2f} s, CPU {Spread(cpu[kind]):.2f} s")
    write_json(options.json, {"runs": options.runs, "wall": wall, "cpu": cpu})


if __name__ == "__main__":
    main()
