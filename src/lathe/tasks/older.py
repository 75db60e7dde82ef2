"""Names that tasks of a user's own may still have from earlier versions."""

from lathe.errors import refuse

RENAMED = {"figures": "metrics", "derived": "computed", "sums": "reduce", "derive": "compute", "judge": "training_loss"}


def refuse_older_names(kind: type) -> None:
    """Raises UserError where a task defines what nothing calls any more, which would lose its metrics in silence."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    refuse(f"{name}.{old} is called {new} now: rename it." for old, new in RENAMED.items() if old in vars(kind))
