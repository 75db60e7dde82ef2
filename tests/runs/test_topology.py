"""NUMA nodes, GPUs and links, on machines that are not this one."""

import json
import os
from pathlib import Path

import pytest

from lathe.runs.environment import describe_environment
from lathe.runs.topology import NODES, describe_topology, read_links

# As nvidia-smi prints them: two H100 on two sockets and a network card; the head is underlined.
LISTED = """0, NVIDIA H100 80GB HBM3, 580.65.06, 00000000:1B:00.0, 81559, 5, 16
1, NVIDIA H100 80GB HBM3, 580.65.06, 00000000:9D:00.0, 81559, [N/A], [N/A]
"""
TABLE = """\x1b[4m\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\t0-1\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t2-3\t1\t\tN/A
NIC0\tPIX\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def smi(folder: Path, listed: str, table: str, code: int = 0) -> None:
    """A program nvidia-smi that prints these."""
    folder.mkdir()
    (folder / "listed").write_text(listed)
    (folder / "table").write_text(table)
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\n[ "$1" = topo ] && cat {folder}/table || cat {folder}/listed\nexit {code}\n')
    program.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """What Linux says of two nodes and two GPUs: (nodes, PCI)."""
    for node in (0, 1):
        folder = tmp_path / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{2 * node}-{2 * node + 1}\n")
        (folder / "meminfo").write_text(f"Node {node} MemTotal:  {node + 1} kB\nNode {node} MemFree: 1 kB\n")
    for address, node in (("0000:1b:00.0", 0), ("0000:9d:00.0", 1)):
        (tmp_path / "pci" / address).mkdir(parents=True)
        (tmp_path / "pci" / address / "numa_node").write_text(f"{node}\n")
    return tmp_path / "node", tmp_path / "pci"


def test_two_sockets_with_a_gpu_each(
    tmp_path: Path, machine: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path / "bin", LISTED, TABLE)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    name, driver = "NVIDIA H100 80GB HBM3", "580.65.06"
    first = {"index": 0, "name": name, "driver": driver, "memory": 81559, "pcie_generation": 5, "pcie_width": 16}
    assert describe_topology(*machine) == {
        "numa": [{"node": 0, "cpus": "0-1", "memory": 1024}, {"node": 1, "cpus": "2-3", "memory": 2048}],
        "gpus": [
            {**first, "numa_node": 0},
            {"index": 1, "name": name, "driver": driver, "memory": 81559, "numa_node": 1},
        ],
        "links": {"GPU0-GPU1": "NV18", "GPU0-NIC0": "PIX", "GPU1-NIC0": "SYS"},
    }


@pytest.mark.parametrize("code", [0, 9])
def test_a_driver_that_fails_leaves_out_the_gpus(
    tmp_path: Path, machine: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """nvidia-smi says in words that it can't reach the driver, with a code or without."""
    smi(tmp_path / "bin", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", "", code)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert list(describe_topology(*machine)) == ["numa"]


def test_a_machine_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_topology(tmp_path / "no", tmp_path / "no") == {}


def test_links_of_one_gpu_and_of_no_table() -> None:
    assert read_links("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-3\t0\n") == {}
    assert read_links("no devices were found") == {}


def test_a_run_records_it() -> None:
    found = json.loads(json.dumps(describe_environment()))["topology"]
    nodes = len(list(NODES.glob("node[0-9]*")))
    assert len(found.get("numa", [])) == nodes
    assert all(node["memory"] > 0 for node in found.get("numa", []))
