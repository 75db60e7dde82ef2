"""Names that tasks of earlier versions had: what nothing would call is refused."""

import pytest

from lathe.errors import UserError
from lathe.tasks import Task
from lathe.tasks.older import RENAMED


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_task_with_a_name_of_an_earlier_version_is_refused(old: str, new: str) -> None:
    with pytest.raises(UserError, match=rf"Mine\.{old} is called {new} now: rename it\.$"):
        type("Mine", (Task,), {old: lambda self: None})
    type("Mine", (Task,), {new: getattr(Task, new)})
