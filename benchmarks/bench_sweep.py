"""A sweep of eight jobs, two at a time, compared with the same jobs one after the other; and the cost of a job.

    python benchmarks/bench_sweep.py --rounds 3
    python benchmarks/bench_sweep.py --rounds 3 --job model=mlp model.net.width=512 trainer.max_epochs=12

A job is `python train.py`, or one with the overrides of --job: the shorter it is, the more the start of the sweep
counts. Each round runs both sweeps, with one thread per job. The cost of a job is the time of the serial sweep, without
its start (until the first job begins) and without the seconds of the runs themselves, divided by the number of jobs.
Bars, on two cores: 0.6 of the serial time, and 0.5 s per job.
"""

import json
import tempfile
import time
from pathlib import Path

from common import describe_machine, divide, parser, run
from suites.results import Spread

JOBS = 8
WORDS = ("trainer.accelerator=cpu", "trainer.enable_progress_bar=false", f"seed=range(1,{JOBS + 1})")


def sweep(slots: int, job: list[str]) -> dict[str, float]:
    """Return the seconds of the command, of its start, and of all runs by themselves."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        run("train.py", "-m", *WORDS, *job, f"sweep.jobs={slots}", cwd=folder)
        whole = time.time() - began
        runs = [path.parent for path in Path(folder).glob("logs/train/*/result.json")]
        assert len(runs) == JOBS
        first = min((path / "environment.json").stat().st_mtime for path in runs)
        alone = sum(json.loads((path / "result.json").read_text())["seconds"] for path in runs)
    return {"seconds": whole, "start": first - began, "runs": alone}


def main() -> None:
    made = parser(__doc__, rounds=3)
    made.add_argument("--job", nargs="*", default=[], help="overrides of a job, such as model=mlp (default none)")
    options = made.parse_args()
    serial, queued = [], []
    for _ in range(options.rounds):
        serial.append(sweep(1, options.job))
        queued.append(sweep(2, options.job))
    print(f"{describe_machine('torch', 'lightning', 'hydra-core')}; n = {options.rounds}")
    ratio = divide([one["seconds"] for one in queued], [one["seconds"] for one in serial])
    costs = Spread([(one["seconds"] - one["start"] - one["runs"]) / JOBS for one in serial])
    print(f"queue of 2 / serial: {ratio:.2f}, bar 0.6\nseconds per job in addition to its run: {costs:.2f}, bar 0.5")
    seconds, start = (Spread([one[key] for one in serial]) for key in ("seconds", "start"))
    print(f"serial: {seconds:.1f} s, of which {start:.1f} s before the first job")


if __name__ == "__main__":
    main()
