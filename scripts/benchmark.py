"""Measures training: python scripts/benchmark.py suite=scaling (or parallel, precision, compile, memory, overhead, gpu;
cli runs an older script), reading, the Trainer and integers (suite=loaders, trainer, int8), and a finished run's files:
suite=inference run=logs/latest"""

import runpy
import sys
import time
from pathlib import Path

import hydra
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from lathe import trust
from lathe.benchmark import crew, sides, suites
from lathe.benchmark.thresholds import missed
from lathe.config.resolve import resolve
from lathe.config.validate import check
from lathe.errors import UserError, refuse, require
from lathe.launch.command_checks import check_command
from lathe.launch.devices import count_processes
from lathe.launch.error_reporting import report_error, report_errors
from lathe.launch.signals import raise_on_signal

OLDER = ("cli",)


@report_errors
@hydra.main(version_base="1.3", config_path="../configs", config_name="benchmark")
def main(cfg: DictConfig) -> None:
    try:
        with raise_on_signal():
            benchmark(cfg)
    except Exception as error:
        sys.exit(report_error(error))


def benchmark(cfg: DictConfig) -> None:
    """Run the suite of `cfg`, and write its tables."""
    request = resolve(cfg)
    check_command(cfg, request)
    trust.allow(request)
    suite = request["suite"] = sides.now(str(request["suite"]))
    where = request["output"] or f"{request['paths']['log_dir']}/benchmark/{suite}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    output = Path(where).absolute()
    require(not output.is_file(), f"output={where} is a file: name a folder.")
    if suite in OLDER:
        suites.refuse_others(request, {})
        output.mkdir(parents=True, exist_ok=True)
        rounds = ["--rounds", str(request["rounds"])] if request["rounds"] else []
        script = Path(__file__).parents[1] / "benchmarks" / f"bench_{suite}.py"
        sys.argv = [str(script), *rounds, "--json", str(output / "results.json")]
        runpy.run_path(str(script), run_name="__main__")
        return
    if suite in sides.DEFAULTS:
        request = sides.plan(request)
        if suite == "int8":
            request["export"] = resolve(compose("export", overrides=[*sides.FILES]))["target"]
        sides.run(request, output)
        return
    base = None
    if request["base"] is not None:
        base = resolve(compose("train", overrides=suites.base_of(request)))
    cases, request = suites.plan(request, base)
    if suite == suites.INFERENCE:
        from lathe.benchmark import inference  # imported late, since it imports torch

        there = GlobalHydra.instance().config_loader().get_group_options("target")
        names = inference.targets_of(request["targets"], there)
        words = [
            f"run={request['run']}",
            f"target=[{','.join(names)}]",
            *inference.check_overrides(request["overrides"], names),
        ]
        asked = resolve(compose("export", overrides=words))
        refuse(check(asked, "export"))
        inference.compare(request, asked["target"], output)
        return
    composed, refused = {}, {}
    for case in cases:
        try:
            resolved = resolve(compose("train", overrides=suites.overrides_of(case, request)))
            refuse(check(resolved))
            count_processes(resolved)
        except UserError as error:
            if not case.optional or case is cases[0]:
                raise
            refused[case.name] = " ".join(map(str, error.args))
        else:
            composed[case.name] = resolved
    began = time.monotonic()
    results = crew.run(cases, composed, request, lambda line: print(line, flush=True), refused)
    from lathe.benchmark import report, tables  # imported late, since they import torch, after the measurements

    output.mkdir(parents=True, exist_ok=True)
    report.write(output, cases, results, request, time.monotonic() - began)
    if request["assert"]:
        refuse(missed(tables.judge(cases, results, request)))


if __name__ == "__main__":
    sys.argv = [sys.argv[0], *suites.typed(sys.argv[1:])]
    main()
