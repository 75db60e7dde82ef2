"""The configuration of a list of overrides, composed in this process as a command composes what is typed. Imports no
torch.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra import compose, initialize_config_dir, version
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from lathe.config.composed import flatten
from lathe.config.help import names_of
from lathe.config.hydra_errors import explain_overrides
from lathe.config.typed import as_typed
from lathe.config.words import translate
from lathe.configs import FOLDER
from lathe.errors import require

TYPED = "lathe_overrides"  # a flag of a composed configuration, which its copies keep: the overrides it was made of


@contextmanager
def composing(verb: str, overrides: Sequence[str]) -> Iterator[DictConfig]:
    """The configuration of `overrides` for `verb`, such as train, and for as long as this is open Hydra's globals as in
    a command; afterwards they are what they were.

    Raises:
        UserError: Hydra refuses an override; a sentence for each.
    """
    names = names_of(FOLDER, verb)
    words = [str(word) for word in overrides]
    flag = next((word for word in words if word.startswith("-")), None)
    require(flag is None, f"{flag}: only overrides are taken here, such as model=mlp; a sweep is a loop.")
    with _hydra_as_found():
        try:
            initialize_config_dir(str(FOLDER), version_base="1.3", job_name=verb)
            words = translate(words, names)
            cfg = compose(verb, overrides=words, return_hydra_config=True)
        except Exception as error:
            GlobalHydra.instance().clear()
            explained = explain_overrides(error, FOLDER, verb, words, names)
            if explained is None:
                raise
            raise explained from error
        with open_dict(cfg):
            cfg.hydra.mode, cfg.hydra.job.config_name = RunMode.RUN, verb
            HydraConfig.instance().set_config(cfg)
            del cfg["hydra"]
        _remember(cfg, words)
        yield cfg


@contextmanager
def _hydra_as_found() -> Iterator[None]:
    """Hydra's globals, also where a notebook has initialised it for itself."""
    used, config, base = GlobalHydra.instance().hydra, HydraConfig.instance().cfg, version.getbase()
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra, HydraConfig.instance().cfg = used, config
        version.VersionBase.instance().version_base = base  # setbase takes nothing that is not set yet


def _remember(cfg: Any, words: list[str]) -> None:
    cfg._set_flag([TYPED], [words])


def overrides_of(cfg: DictConfig, verb: str = "train") -> list[str]:
    """The overrides that compose `cfg`: those that `lathe.compose` was given, and one for each key that was changed
    since.
    """
    flags: dict[str, Any] = cfg._metadata.flags or {}
    words = [str(word) for word in flags.get(TYPED) or []]
    with composing(verb, words) as fresh:
        before, after = (flatten(OmegaConf.to_container(tree)) for tree in (fresh, cfg))
    added = [_word(key, value, key in before) for key, value in after.items() if before.get(key, fresh) != value]
    left_out = {f"~{_highest(key, after)}": None for key in before if not _around(key, after)}
    return [*words, *left_out, *added]


def _around(key: str, keys: Iterable[str]) -> bool:
    """Whether `key` is one of the `keys`, or lies above or below one."""
    return any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in keys)


def _highest(key: str, keys: Iterable[str]) -> str:
    """The highest node above `key`, or itself, that has none of the `keys` below it."""
    parts = key.split(".")
    above = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next(name for name in above if not _around(name, keys))


def _word(key: str, value: Any, there: bool) -> str:
    return f"{'' if there else '++'}{key}={as_typed(value)}"
