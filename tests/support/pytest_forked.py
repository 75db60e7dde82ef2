"""pytest as a command that `processes.py` can fork."""

import sys

import pytest

from support.workers import let_plugins_be_imported

if __name__ == "__main__":  # not in the processes that tests spawn
    let_plugins_be_imported()
    sys.exit(pytest.main())
