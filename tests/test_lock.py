"""requirements.lock contains the pins of requirements.txt and their dependencies, each with a hash."""

import re
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from support.runs import ROOT

LINE = re.compile(r"([a-z0-9][a-z0-9.-]*)==(\S+) --hash=sha256:([0-9a-f]{64})")
TEXT = (ROOT / "requirements.lock").read_text()
# The lock's platform.
MACHINE = {
    "python_version": "3.11",
    "python_full_version": "3.11.7",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
    "implementation_name": "cpython",
    "extra": "",
}


def pins() -> list[Requirement]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and line[0] not in "#-"]


def locked() -> dict[str, Version]:
    lines = [line for line in TEXT.splitlines() if not line.startswith("#")]
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    found = {name: Version(version) for name, version, _ in LINE.findall(TEXT)}
    assert len(found) == len(lines)
    return found


def test_every_pin_is_in_it_at_its_version() -> None:
    found = locked()
    assert [pin.name for pin in pins() if canonicalize_name(pin.name) not in found] == []
    assert [str(pin) for pin in pins() if found[canonicalize_name(pin.name)] not in pin.specifier] == []
    assert found["torch"].local == "cpu"


def test_what_a_pin_needs_is_in_it() -> None:
    """According to this environment's packages at the pinned versions. torch's dependencies depend on its build."""
    found, missing = locked(), []
    for pin in (pin for pin in pins() if pin.name != "torch"):
        assert metadata.version(pin.name) in pin.specifier
        for item in map(Requirement, metadata.requires(pin.name) or []):
            version = found.get(canonicalize_name(item.name))
            if item.marker and not item.marker.evaluate(MACHINE):
                continue
            if version is None or not item.specifier.contains(version, prereleases=True):
                missing.append(f"{pin.name}: {item}")
    assert missing == []
