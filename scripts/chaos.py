"""Kills runs at random and compares what becomes of them with runs that were left alone: law 3, for maintainers.

    python scripts/chaos.py --n 100 --seed 1

Each case takes the next variant, starts the real command, ends it at a moment that chance chooses (inside a step, a
validation, the test, a write to the disk or the receipt; from outside at any moment, by SIGKILL, SIGTERM or the death
of one rank), continues it with `resume=`, sometimes killed again, until it is complete, and compares with its variant's
uninterrupted run: weights of last.ckpt and best.ckpt bit for bit, the metrics of result.json and the lines of
metrics.csv but what a clock says, receipts, and what lies about. `--case` repeats a case.
"""

import argparse
import json
import multiprocessing
import os
import random
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import lathe.training.compression_finalize
from lathe.runs.run_discovery import compare_runs, metric_rows
from lathe.tasks import Task

ROOT = Path(__file__).resolve().parent.parent
_COMMON = """
    trainer.accelerator=cpu trainer.enable_progress_bar=false trainer.enable_model_summary=false trainer.max_epochs=3
    data.batch_size=100 trainer.log_every_n_steps=2 callbacks.throughput.skip_steps=3 compression.receipt=none
    callbacks.checkpoint.every_n_train_steps=4
"""
COMMON = tuple(_COMMON.split())
MLP = ("model=mlp", "model.net.width=16", "model.net.depth=2", "model.net.dropout=0.2")
RESNET = ("model=resnet20", "model.net.width=4", "model.net.depth=8")
TWO = (*MLP, "trainer.devices=2", "callbacks.preemption.every_n_steps=2", "callbacks=[default,ema]")
VARIANTS: dict[str, tuple[str, ...]] = {
    "mlp": MLP,
    "resnet": RESNET,
    "ema": (*MLP, "callbacks=[default,ema]", "optimizer=adamw"),
    "accumulate": (
        *MLP,
        "trainer.accumulate_grad_batches=3",
        "trainer.gradient_clip_val=0.1",
        "callbacks.throughput.window=5",
    ),
    "val_check": (*RESNET, "trainer.val_check_interval=5", "scheduler=one_cycle"),
    "workers": (*MLP, "data.loader=workers", "data.num_workers=1"),
    "async": (*RESNET, "callbacks.checkpoint.async=true", "callbacks.checkpoint.every_n_train_steps=1"),
    "prune": (*RESNET, "compression=prune", "compression.prune.every_n_steps=2"),
    "qat": (*RESNET, "compression=qat", "precision=bf16-mixed"),
    "distill": (*MLP, "compression=distill", "compression.distill.teacher=ema"),
    "channels": (*RESNET, "compression=prune_channels", "compression.prune_channels.min_channels=1"),
    "receipt": (*MLP, "compression=prune", "compression.receipt=quick"),
    "ddp": (*TWO, "strategy=ddp"),
    "fsdp": (*TWO, "strategy=fsdp", "callbacks.checkpoint.async=false"),
}
SEVERAL = ("ddp", "fsdp")  # their ranks are separate processes, which can only be killed from outside
PATIENCE = 300.0  # seconds after which a process counts as hung


def _counted(
    counts: Counter[str], event: str, fault: tuple[str, int] | None, function: Callable[..., Any]
) -> Callable[..., Any]:
    def once_more() -> None:
        counts[event] += 1
        if (event, counts[event]) == fault:
            os.kill(os.getpid(), signal.SIGKILL)

    def call(*args: Any, **kwargs: Any) -> Any:
        once_more()
        result = function(*args, **kwargs)
        once_more()
        return result

    return call


_STEPS = [(Task, "training_step", "step"), (Task, "validation_step", "validation"), (Task, "test_step", "test")]
WATCHED = [
    *_STEPS,
    (os, "replace", "write"),
    (os, "fsync", "write"),
    (lathe.training.compression_finalize, "write_receipt", "receipt"),
]


def _child(arguments: list[str], folder: str, fault: tuple[str, int] | None) -> None:
    """Run `train.py` in `folder`; die before or after the call that `fault` counts to, or write the counts."""
    os.setsid()
    os.chdir(folder)
    with open("output.txt", "a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for owner, name, event in WATCHED:
        setattr(owner, name, _counted(counts, event, fault, getattr(owner, name)))
    sys.argv = [str(ROOT / "train.py"), *arguments]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        Path("counts.json").write_text(json.dumps(counts))


def start(arguments: list[str], folder: Path, fault: tuple[str, int] | None = None) -> Any:
    process = multiprocessing.get_context("forkserver").Process(target=_child, args=(arguments, str(folder), fault))
    process.start()
    return process


def end(process: Any, due: Callable[[], bool] | None = None, kind: str = "kill") -> int:
    """Wait for the end; once `due`, end all processes, the first (`term`) or the last (`rank`). Returns the code."""
    deadline = time.monotonic() + PATIENCE
    while process.is_alive():
        if time.monotonic() > deadline:
            _send(signal.SIGKILL, *_session(process.pid))
            raise TimeoutError(f"hung for {PATIENCE:.0f} s")
        if due is not None and due():
            all_of_it, due = _session(process.pid), None
            which = {"kill": all_of_it, "term": [process.pid], "rank": all_of_it[-1:]}[kind]
            _send(signal.SIGTERM if kind == "term" else signal.SIGKILL, *which)
        process.join(0.005 if due else 0.1)
    _send(signal.SIGKILL, *_session(process.pid))  # loader workers, and an agent's ranks
    return int(process.exitcode)


def _session(leader: int) -> list[int]:
    processes = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(int(path.name)) == leader:
                processes.append(int(path.name))
    return sorted(processes)


def _send(number: int, *processes: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def runs(folder: Path) -> list[Path]:
    return sorted({path.parent.resolve() for path in (folder / "logs").glob("*/[!.]*/config.yaml")})


@dataclass
class Alone:
    """A variant's uninterrupted run, and the counts of its events."""

    directory: Path
    counts: dict[str, int]
    lines: int


def undisturbed(variant: str, folder: Path) -> Alone:
    folder.mkdir(parents=True)
    if end(start([*COMMON, *VARIANTS[variant], f"paths.log_dir={folder}/logs"], folder)):
        raise SystemExit(f"{variant} fails undisturbed: {(folder / 'output.txt').read_text()[-3000:]}")
    (directory,) = runs(folder)
    return Alone(directory, json.loads((folder / "counts.json").read_text()), len(metric_rows(directory)))


@dataclass
class Case:
    """One run, its deaths, and its differences."""

    number: int
    variant: str
    deaths: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def disturb(case: Case, arguments: list[str], folder: Path, alone: Alone, chance: random.Random) -> int:
    """Run the command, and end it at a moment drawn from `chance`; return its exit code."""
    drawn = ("step", "step", "write", "write", "validation", "test", "receipt")  # weighted by repetition
    inside = [event for event in drawn if alone.counts.get(event)]
    inside, outside = ([], ["kill", "rank", "term"]) if case.variant in SEVERAL else (inside, ["kill", "kill", "term"])
    kind = chance.choice([*inside, *outside])
    if kind in inside:
        fault = (kind, chance.randint(1, alone.counts[kind]))
        code = end(start(arguments, folder, fault))
        moment = f"{kind} {fault[1]} of {alone.counts[kind]}"
    else:
        lines, delay = chance.randint(0, alone.lines), chance.uniform(0.0, 1.5 if chance.random() < 0.3 else 0.05)
        seen: list[float] = []

        def due() -> bool:
            if not seen and (not lines or _lines(folder) >= lines):
                seen.append(time.monotonic())
            return bool(seen) and time.monotonic() >= seen[0] + delay

        code = end(start(arguments, folder), due, kind)
        moment = f"{kind} {delay:.3f} s after line {lines}"
    if code:
        case.deaths.append(f"{moment} (exit {code})")
    return code


def _lines(folder: Path) -> int:
    with suppress(OSError, IndexError):
        return (runs(folder)[-1] / "metrics.csv").read_text().count("\n") - 1
    return 0


def play(number: int, variant: str, seed: int, alone: Alone, folder: Path) -> Case:
    """Run one case to the comparison."""
    case, chance = Case(number, variant), random.Random(f"{seed} {number} {variant}")  # noqa: S311
    try:
        for attempt in range(10):  # a moment may come after the run's end
            case_folder = folder / f"{number}.{attempt}"
            case_folder.mkdir(parents=True)
            fresh = [*COMMON, *VARIANTS[variant], f"paths.log_dir={case_folder}/logs"]
            if code := disturb(case, fresh, case_folder, alone, chance):
                break
        for again in range(6):
            directories = runs(case_folder)
            arguments = (
                [f"resume={directories[-1]}"]
                if directories and (directories[-1] / "environment.json").exists()
                else [*fresh, "resume=auto"]
            )
            twice = not again and chance.random() < 0.35
            code = disturb(case, arguments, case_folder, alone, chance) if twice else end(start(arguments, case_folder))
            if not code:
                break
        if code:
            case.wrong.append(f"not complete, exit {code}: {(case_folder / 'output.txt').read_text()[-600:]}")
        elif len(runs(case_folder)) != 1:
            case.wrong.append(f"{len(runs(case_folder))} run directories")
        else:
            case.wrong += compare_runs(runs(case_folder)[0], alone.directory)
    except Exception as error:
        case.wrong.append(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    line = f"{number}: {variant}: {'; '.join(case.deaths)}: {'; '.join(case.wrong) or 'equal'}"
    print(line, file=sys.stderr, flush=True)
    return case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=len(VARIANTS), help="cases; each variant in turn")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6, help="of all chance; printed")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="names, separated by commas")
    parser.add_argument("--case", type=int, help="the number of the one case to repeat")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="cases at the same time")
    parser.add_argument("--keep", type=Path, help="a new folder for all runs; otherwise they are removed")
    options = parser.parse_args()
    names = options.variants.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        parser.error(f"--variants {','.join(unknown)}: choose from {', '.join(VARIANTS)}")
    numbers = range(options.n) if options.case is None else [options.case]
    began, os.environ["OMP_NUM_THREADS"] = time.monotonic(), "1"
    multiprocessing.get_context("forkserver").set_forkserver_preload(["lathe.training.train", "lathe.launch.launcher"])
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.jobs) as pool:
        folder = options.keep or Path(temporary)
        used = [name for i, name in enumerate(names) if any(number % len(names) == i for number in numbers)]
        alone = dict(zip(used, pool.map(lambda name: undisturbed(name, folder / name), used), strict=True))
        drawn = [(i, names[i % len(names)]) for i in numbers]
        cases = list(pool.map(lambda one: play(one[0], one[1], options.seed, alone[one[1]], folder), drawn))
    print("| variant | cases | deaths | equal |\n| --- | --- | --- | --- |")
    for name in used:
        own = [case for case in cases if case.variant == name]
        print(
            f"| {name} | {len(own)} | {sum(len(case.deaths) for case in own)} | {sum(not case.wrong for case in own)} |"
        )
    wrong = [case for case in cases if case.wrong]
    equal, deaths = f"{len(cases) - len(wrong)} of {len(cases)}", sum(len(case.deaths) for case in cases)
    versions = "; ".join(f"{name} {metadata.version(name)}" for name in ("torch", "lightning"))
    print(f"\nseed {options.seed}: {equal} equal after {deaths} deaths; {versions}; {time.monotonic() - began:.0f} s.")
    for case in wrong:
        print(f"{case.variant}: {'; '.join(case.deaths)}: {'; '.join(case.wrong)}")
        print(f"  python scripts/chaos.py --seed {options.seed} --variants {options.variants} --case {case.number}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
