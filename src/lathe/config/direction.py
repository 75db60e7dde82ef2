"""Which way a sweeper optimises, held against what the run reports. Imports the task only where a sweeper optimises at
all.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lathe.config.words import key_of
from lathe.errors import UserError

# Parts of names of which lower is better, where no task is at hand to say it.
_LOWER = re.compile(
    r"loss|perplexity|err|error|mae|mse|rmse|mape|nll|ece|brier|wer|cer|fid|entropy|distance|regret|hamming|seconds|ms|"
    "bytes|parameters|macs|latency|time|gap|peak|wait|sync|energy"
)
# Where Hydra's plug-ins say it (Optuna, Nevergrad, Ax), the value that means minimising, and the value that means
# maximising.
SWITCHES: dict[str, tuple[Any, Any]] = {
    "hydra.sweeper.direction": ("minimize", "maximize"),
    "hydra.sweeper.optim.maximize": (False, True),
    "hydra.sweeper.ax_config.experiment.minimize": (True, False),
}


def check_direction(cfg: Mapping[str, Any], sweeper: Mapping[str, Any], typed: Sequence[str]) -> None:
    """Holds the direction of a sweeper that optimises, whose resolved configuration is `sweeper`, against the objective
    of `cfg`. All plug-ins minimise by default, and a task's own metric is mostly one of which more is better. `typed`
    are the overrides of Hydra's keys: a direction among them was chosen.

    Raises:
        UserError: the sweep would look for the worst run; the sentence has the override that turns it round.
    """
    for key, (low, high) in SWITCHES.items():
        asked = _look_up(sweeper, key.removeprefix("hydra.sweeper.").split("."))
        asked = getattr(asked, "name", asked)  # Optuna's is an enumeration
        if asked not in (low, high) or isinstance(asked, bool) != isinstance(low, bool) or key in map(key_of, typed):
            continue
        name, minimised = objective_of(cfg)
        if name is None:
            continue
        if minimised is None:
            print(
                f"The sweep takes {'lower' if asked == low else 'higher'} {name} for better: {key}={_word(asked)} "
                "says so."
            )
        elif minimised != (asked == low):
            raise UserError(
                f"{key}={_word(asked)} would look for the worst run, as {'lower' if minimised else 'higher'} {name} is "
                f"better: add {key}={_word(low if minimised else high)}."
            )


def lower_is_better(name: str) -> bool:
    """Whether a metric is to be small, by its name alone: of test/loss, val/word_error_rate and seconds it is."""
    words = re.split(r"[^a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name.rpartition("/")[2]).lower())
    return (any(map(_LOWER.fullmatch, words)) and not name.endswith("_per_s")) or name.endswith("epoch_s")


def _look_up(tree: Any, parts: Sequence[str]) -> Any:
    for part in parts:
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def _word(value: Any) -> str:
    return str(value).lower()


def objective_of(cfg: Mapping[str, Any]) -> tuple[str | None, bool | None]:
    """The name of what a job returns, and whether lower is better; None where nothing says so."""
    from hydra.utils import get_object

    task = get_object(cfg["task"]["_target_"])
    own, ways = _ways(task, cfg["task"].get("metrics"))
    checkpoint = cfg["callbacks"].get("checkpoint") or {}
    monitor, mode = checkpoint.get("monitor"), checkpoint.get("mode")
    monitor = own or None if monitor == "auto" else monitor
    name = cfg["objective"] or monitor
    if name == monitor and mode in ("min", "max"):
        return name, mode == "min"
    split, _, metric = str(name).rpartition("/")
    return name, ways.get(metric) if split else None


def _ways(task: Any, metrics: Any) -> tuple[str | None, dict[str, bool | None]]:
    """What a task of this class and these nodes of metrics monitors, and for each metric whether lower is better."""
    from hydra.utils import instantiate

    if metrics is not None and hasattr(task, "directions"):
        found: tuple[str | None, dict[str, bool | None]] = task.directions(instantiate(metrics, _convert_="all"))
        return found
    known = {*getattr(task, "metrics", ()), *getattr(task, "computed", ())}
    return getattr(task, "monitor", None), {name: name in getattr(task, "minimised", ()) for name in known}
