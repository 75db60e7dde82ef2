"""Names that tasks of a user's own may still have from earlier versions."""

from lathe.errors import UserError

RENAMED = {"figures": "metrics", "derived": "computed", "sums": "reduce", "derive": "compute", "judge": "training_loss"}


def refuse_older_names(kind: type) -> None:
    """Raises UserError where a task defines what nothing calls any more, which would lose its metrics in silence."""
    for old, new in RENAMED.items():
        if old in vars(kind):
            raise UserError(f"{kind.__module__}.{kind.__qualname__}.{old} is called {new} now: rename it.")
