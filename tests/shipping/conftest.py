"""Runs that several tests of shipping export."""

import pytest
from exporting import made
from helpers import SMALL

from lathe.rundir import RunDir


@pytest.fixture(scope="session")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A small net on digits."""
    return made(tmp_path_factory.mktemp("logs"), *SMALL)
