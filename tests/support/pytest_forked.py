"""pytest as a command that `processes.py` can fork."""

import sys

import pytest

from support.workers import let_plugins_be_imported

let_plugins_be_imported()
sys.exit(pytest.main())
