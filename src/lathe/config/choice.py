"""What is typed for a group: one choice, or several where the group takes them."""

from collections.abc import Sequence

from lathe.config.flags import Groups
from lathe.config.listed import WHOLE_NODE, top_level
from lathe.errors import UserError, did_you_mean, require

SEVERAL = ("callbacks", "logger", "compression")  # groups whose choices act side by side
BESIDE = (*SEVERAL, "target")  # and those of which export.py takes several, that are never added to a default
OVER = ("experiment", "debug")  # of which a later one stands over an earlier one, and that is what it is for
NOTHING = ("", "null", "none", "None", "[]", "false", "False")  # ways to say that a group is to hold no part


def check_choice(word: str, key: str, value: str, groups: Groups) -> None:
    """Raises UserError where a word chooses what a group does not take: Hydra would mix the files of a list, of which
    the last wins, and passes over a place that it was told to put the keys into."""
    typed = word.split("=", 1)[0]
    require("@" not in typed, f"{typed}=...: a group's keys stand in one place: write {key}=<choice>, without the @.")
    listed = f"{key}=[{'default,' * ('default' in groups[key])}{value}]"
    require(key not in SEVERAL or not WHOLE_NODE.match(value), f"{word}: a part stands in the list of them: {listed}.")
    inside = top_level(value[1:-1]) if value.startswith("[") and value.endswith("]") else []
    if key in BESIDE:
        nothing = next((item for item in inside if item in NOTHING and item not in ("null", "false", "False")), None)
        require(
            nothing is None or len(inside) == 1,
            f"{word}: {nothing} beside others leaves nothing out: leave the word {nothing} out, or write {key}=none.",
        )
        names = [item for item in inside if not item.startswith("{")]
        twice = next((name for name in names if names.count(name) > 1), None)
        require(twice is None, f"{word}: {twice} stands there twice: leave one out.")
    elif key not in OVER:
        each = "type the other's values" if key == "sweep" else f"for a run of each: -m {key}={','.join(inside)}"
        require(len(inside) < 2, f"{word}: {key} takes one choice, {' or '.join(inside)}; {each}.")


def check_local(value: str, options: Sequence[str]) -> None:
    """Raises UserError for a choice of `local` that there is not: none has to be there, so Hydra goes on without."""
    for name in top_level(value):
        require(
            name in options,
            f"local={name}: there is no such choice; {did_you_mean(name, options) if options else ''}"
            f"{'' if options else f'write configs/local/{name}.yaml, or leave it out'}",
        )


def check_swept(key: str, word: str) -> None:
    """Raises UserError where a sweep is to go over what is known before it begins: its own keys, and Hydra's."""
    if key.partition(".")[0] == "sweep":
        raise UserError(
            f"{word}: a sweep does not go over its own keys: name one, and type the values that another would bring, "
            "as in sweep=folds seed=1,2,3."
        )
    require(not key.startswith("hydra."), f"{word}: a sweep does not go over Hydra's keys: give one value.")
