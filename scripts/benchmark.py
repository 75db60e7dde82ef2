"""Measures training: python scripts/benchmark.py suite=scaling (or parallel, precision, compile, memory, overhead, gpu;
cli: start-up), reading, the Trainer and integers (suite=loaders, trainer, int8), and a finished run's files:
suite=inference run=logs/latest"""

import runpy
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import hydra
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from lathe import trust
from lathe.config.resolve import resolve
from lathe.config.validate import check
from lathe.errors import UserError, refuse, require
from lathe.launch.command_checks import check_command
from lathe.launch.devices import count_processes
from lathe.launch.error_reporting import raise_on_signal, report_error, report_errors

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from suites import cases
from suites.results import TABLES, judge, missed, rows, write
from suites.runner import run

BENCHMARKS = Path(cases.__file__).parents[1]


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
    suite = request["suite"]
    name = f"{request['paths']['log_dir']}/benchmark/{suite}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    output = Path(request["output"] or name).absolute()
    require(not output.is_file(), f"output={output} is a file: name a folder.")
    if suite == "cli":
        _run_script("bench_cli", cases.fill(request), output)
    elif suite == cases.INFERENCE:
        _compare_runtimes(cases.fill(request), output)
    elif suite in cases.SIDES:
        _compare_sides(cases.fill(request), output)
    else:
        _compare_trainings(request, output)


def _run_script(name: str, request: dict[str, Any], output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    rounds = ["--rounds", str(request["rounds"])] if request["rounds"] else []
    sys.argv = [str(BENCHMARKS / f"{name}.py"), *rounds, "--json", str(output / "results.json")]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _compare_runtimes(request: dict[str, Any], output: Path) -> None:
    from suites import inference  # imported late, since it imports torch

    configured = GlobalHydra.instance().config_loader().get_group_options("target")
    names = inference.targets_of(request["targets"], configured)
    options = inference.check_overrides(request["overrides"], names)
    requested = resolve(compose("export", overrides=[f"run={request['run']}", f"target=[{','.join(names)}]", *options]))
    refuse(check(requested, "export"))
    inference.compare(request, requested["target"], output)


def _compare_sides(request: dict[str, Any], output: Path) -> None:
    import torch  # imported late, so that mistakes in the request are reported first

    gpu = request.get("accelerator") != "gpu" or torch.cuda.is_available()
    require(gpu, f"accelerator=gpu: suite={request['suite']} needs an NVIDIA GPU; none is visible.")
    suite, began = import_module(f"suites.{request['suite']}"), time.monotonic()
    if request["suite"] == "int8":
        request["export"] = resolve(compose("export", overrides=[*suite.EXPORT]))["target"]
    torch.set_num_threads(request["threads"])
    facts, results = suite.measure(request, output)
    texts, drawing = suite.tables(facts, results, request)
    write(output, texts, drawing, facts, results, request, time.monotonic() - began)
    if request["assert"]:
        refuse(missed(suite.claims(results)))


def _compare_trainings(request: dict[str, Any], output: Path) -> None:
    base = None
    if request["base"] is not None:
        base = resolve(compose("train", overrides=cases.base_of(request)))
    all_trainings, request = cases.plan(request, base)
    composed, refused = {}, {}
    for case in all_trainings:
        try:
            resolved = resolve(compose("train", overrides=cases.overrides_of(case, request)))
            refuse(check(resolved))
            count_processes(resolved)
        except UserError as error:
            if not case.optional or case is all_trainings[0]:
                raise
            refused[case.name] = " ".join(map(str, error.args))
        else:
            composed[case.name] = resolved
    began = time.monotonic()
    results = run(all_trainings, composed, request, refused)
    facts = {case.name: {"processes": case.processes, **case.facts} for case in all_trainings}
    texts, drawing = TABLES[request["suite"]](facts, results)
    judged = judge(request, facts, results)
    texts += [rows(judged)] if judged else []
    write(output, texts, drawing, facts, results, request, time.monotonic() - began)
    if request["assert"]:
        refuse(missed(judged))


if __name__ == "__main__":
    sys.argv = [sys.argv[0], *cases.typed(sys.argv[1:])]
    main()
