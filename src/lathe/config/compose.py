"""Compose a list of overrides in this process, as a command does. Imports no torch."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra import compose, initialize_config_dir, version
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from lathe.config.help import names_of
from lathe.config.hydra_errors import explain_overrides
from lathe.config.override_parsing import as_typed, translate
from lathe.config.resolve import flatten
from lathe.configs import FOLDER
from lathe.errors import require

OVERRIDES = "lathe_overrides"  # a flag of a composed configuration and its copies: the overrides that it was made of


@contextmanager
def composing(verb: str, overrides: Sequence[str]) -> Iterator[DictConfig]:
    """Compose `overrides` for `verb`, such as train, and set Hydra's globals as in a command until this is closed.

    Raises:
        UserError: with a message for each override that Hydra refuses.
    """
    names = names_of(FOLDER, verb)
    words = [str(word) for word in overrides]
    flag = next((word for word in words if word.startswith("-")), None)
    require(flag is None, f"{flag}: only overrides are taken here, such as model=mlp; write a sweep as a loop.")
    with _restored_hydra():
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
        untyped: Any = cfg  # flags are typed as booleans
        untyped._set_flag([OVERRIDES], [words])
        yield cfg


@contextmanager
def _restored_hydra() -> Iterator[None]:
    """Restore Hydra's globals at the end, which a notebook may have initialised."""
    hydra, config, base = GlobalHydra.instance().hydra, HydraConfig.instance().cfg, version.getbase()
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra, HydraConfig.instance().cfg = hydra, config
        version.VersionBase.instance().version_base = base  # setbase refuses None


def overrides_of(cfg: DictConfig, verb: str = "train") -> list[str]:
    """Return the overrides that compose `cfg`: those given to `lathe.compose`, and one for each key changed since."""
    flags: dict[str, Any] = cfg._metadata.flags or {}
    words = [str(word) for word in flags.get(OVERRIDES) or []]
    with composing(verb, words) as composed:
        before, after = (flatten(OmegaConf.to_container(tree)) for tree in (composed, cfg))
    missing = object()
    changed = [
        f"{'' if key in before else '++'}{key}={as_typed(value)}"
        for key, value in after.items()
        if before.get(key, missing) != value
    ]
    removed = {f"~{_highest_missing(key, after)}": None for key in before if not _is_related(key, after)}
    return [*words, *removed, *changed]


def _is_related(key: str, keys: Iterable[str]) -> bool:
    """True if one of `keys` is `key`, or a parent or child of it."""
    return any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in keys)


def _highest_missing(key: str, keys: Iterable[str]) -> str:
    parts = key.split(".")
    parents = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next(name for name in parents if not _is_related(name, keys))
