"""launch.threads: physical cores over processes, told; what the environment or a number says comes first."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lathe.config import cores as cores_of_machine
from lathe.launch import threads
from lathe.launch.agent import call


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Sets what the machine has: machine(cpus=8, threads_per_core=2)."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name in ("RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    found: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)

    def has(cpus: int, threads_per_core: int = 2, quota: str | None = None) -> list[int]:
        cores = cpus // threads_per_core
        for cpu in range(cpus):
            folder = tmp_path / f"cpu{cpu}" / "topology"
            folder.mkdir(parents=True)
            siblings = sorted(other for other in range(cpus) if other % cores == cpu % cores)
            (folder / "thread_siblings_list").write_text(",".join(map(str, siblings)) + "\n")
        if quota is not None:
            (tmp_path / "cpu.max").write_text(quota)
        monkeypatch.setattr(cores_of_machine, "CPUS", tmp_path)
        monkeypatch.setattr(cores_of_machine, "QUOTA", tmp_path / "cpu.max")
        for module in (cores_of_machine, threads):
            monkeypatch.setattr(module, "allowed", lambda: set(range(cpus)))
        return found

    return has


def asked(value: Any) -> dict[str, Any]:
    return {"launch": {"threads": value}}


def use(cfg: dict[str, Any]) -> None:
    with threads.threads_of(cfg):
        pass


@pytest.mark.parametrize(
    ("cpus", "per_core", "quota", "local", "count"),
    [
        (8, 2, None, 1, 4),
        (8, 1, None, 1, 8),
        (8, 2, None, 2, 2),
        (8, 2, None, 16, 1),
        (8, 2, "200000 100000", 1, 2),
        (8, 2, "max 100000", 1, 4),
        (8, 2, "50000 100000", 1, 1),
    ],
)
def test_auto_is_physical_cores_over_processes(
    machine: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cpus: int,
    per_core: int,
    quota: str | None,
    local: int,
    count: int,
) -> None:
    found = machine(cpus, per_core, quota)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    use(asked("auto"))
    assert found == [count, 99]
    assert capsys.readouterr().out.startswith(f"launch.threads=auto took {count}: ")


def test_the_environment_comes_before_auto(
    machine: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = machine(8)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    use(asked("auto"))
    assert found == []
    assert capsys.readouterr().out == "launch.threads=auto: OMP_NUM_THREADS=3 says it already, and stays.\n"
    use(asked(2))
    assert found == [2, 99]


def test_null_leaves_torchs_choice_and_other_ranks_say_nothing(
    machine: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = machine(8)
    use(asked(None))
    use({})
    assert found == []
    monkeypatch.setenv("RANK", "1")
    use(asked("auto"))
    assert found == [4, 99]
    assert capsys.readouterr().out == ""


def test_more_threads_than_cpus_are_told(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=r"launch\.threads=3 for 2 processes are more than the 4 CPUs here"):
        use(asked(3))


def test_a_command_on_a_run_takes_its_own_word(machine: Any) -> None:
    found = machine(8)
    call("builtins:len", {**asked(7), "request": asked(5)})
    assert found == [5, 99]
