"""How a machine's cores, memory and GPUs lie together: NUMA nodes, PCIe and NVLink. Imports no torch."""

import re
import shutil
from pathlib import Path
from typing import Any

NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")
ASKED = ("index", "name", "driver_version", "pci.bus_id", "memory.total", "pcie.link.gen.max", "pcie.link.width.max")


def describe_topology(nodes: Path = NODES, pci: Path = PCI) -> dict[str, Any]:
    """`numa`: of each node its `cpus` as Linux writes them (`0-15,32-47`) and its `memory` in bytes; `gpus`: of each
    NVIDIA GPU its name, driver, `memory` in MiB, PCIe generation and width, and the NUMA node that it hangs on; `links`
    between two of them, as nvidia-smi names them (`NV18`: 18 NVLinks; `PIX` to `SYS`: over one PCIe switch to over the
    processors' own link). What the machine does not say is left out.
    """
    numa = _numa(nodes)
    listed = _nvidia_smi(f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader,nounits")
    gpus = [_gpu(line, pci) for line in listed.splitlines() if line.count(",") == len(ASKED) - 1]
    links = read_links(_nvidia_smi("topo", "-m")) if len(gpus) > 1 else {}
    return {name: found for name, found in (("numa", numa), ("gpus", gpus), ("links", links)) if found}


def _numa(nodes: Path) -> list[dict[str, Any]]:
    found = []
    for folder in sorted(nodes.glob("node[0-9]*"), key=lambda folder: int(folder.name[4:])):
        node: dict[str, Any] = {"node": int(folder.name[4:])}
        if cpus := _read(folder / "cpulist"):
            node["cpus"] = cpus
        total = [line.split() for line in _read(folder / "meminfo").splitlines() if "MemTotal:" in line]
        if total and total[0][-2].isdigit():  # Node 0 MemTotal: 16384 kB
            node["memory"] = int(total[0][-2]) * 1024
        found.append(node)
    return found


def _gpu(line: str, pci: Path) -> dict[str, Any]:
    """A line of nvidia-smi; what a GPU does not have, such as PCIe in some machines, it calls [N/A]."""
    fields = {
        name: value for name, value in zip(ASKED, map(str.strip, line.split(",")), strict=True) if value[:1] != "["
    }
    gpu: dict[str, Any] = {"index": int(fields["index"]), "name": fields.get("name"), "driver": fields.get(ASKED[2])}
    for key, name in (("memory", ASKED[4]), ("pcie_generation", ASKED[5]), ("pcie_width", ASKED[6])):
        if fields.get(name, "").isdigit():
            gpu[key] = int(fields[name])
    # nvidia-smi writes a domain of eight digits, Linux one of four: 00000000:1B:00.0 is 0000:1b:00.0
    address = fields.get("pci.bus_id", "").lower()[-12:]
    node = _read(pci / address / "numa_node") if address else ""
    if node.isdigit():  # -1 where there is one node, or the firmware does not say
        gpu["numa_node"] = int(node)
    return gpu


def read_links(text: str) -> dict[str, str]:
    """The links in the table of `nvidia-smi topo -m`, such as `{"GPU0-GPU1": "NV18"}`, each pair once."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)  # the head is underlined
    rows = [line.split() for line in plain.splitlines() if line.strip()]
    head = next((row for row in rows if row[0] == "GPU0" and "X" not in row), [])
    # behind them come "CPU Affinity", "NUMA Affinity" and "GPU NUMA ID"
    columns = [name for name in head if re.fullmatch(r"GPU\d+|NIC\d+|mlx\w+", name)]
    links = {}
    for row in rows:
        if row[0] not in columns or "X" not in row:
            continue
        for other, link in zip(columns, row[1:], strict=False):
            if columns.index(other) > columns.index(row[0]):
                links[f"{row[0]}-{other}"] = link
    return links


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _nvidia_smi(*arguments: str) -> str:
    """What it prints; nothing where there is none, it fails or does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    import subprocess  # here: its import would weigh on every --help

    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=10)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
