"""Loggers."""

from lathe.config.schema.rule import Rule, flag, items, text

LOGGERS: dict[str, dict[str, Rule]] = {
    "lathe.loggers.csv": {},
    "lathe.loggers.tensorboard": {},
    "lathe.loggers.mlflow": {
        "experiment_name": text("a name"),
        "tracking_uri": text("an address") | None,
        "run_name": text("a name") | None,
    },
    "lathe.loggers.wandb": {
        "project": text("a name"),
        "name": text("a name") | None,
        "offline": flag,
        "group": text("a name") | None,
        "tags": items(text("a label")),
        "entity": text("a name") | None,
        "log_model": flag,
    },
    "lathe.loggers.comet": {"project": text("a name"), "workspace": text("a name") | None},
    "lathe.loggers.aim": {"repo": text("a folder or an address"), "experiment": text("a name")},
}
