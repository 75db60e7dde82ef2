"""Caches Hydra's composition: the tests compose some two thousand times, a third of their time.

Cached, while they are unchanged: files, and the result of a choice of groups. Values are set on a copy, as Hydra does;
errors are not cached. Commands in a new Python compose without the cache.
"""

import copy
import functools
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hydra import compose as hydras_compose
from hydra._internal import config_loader_impl as hydras
from hydra._internal import defaults_list as defaults_lists
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository, IConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, UnionNode, base
from omegaconf.errors import OmegaConfBaseException

Loader = hydras.ConfigLoaderImpl
_map_anew = defaults_lists._create_interpolation_map
_parents_anew = base.Box._re_parent
_repository_anew, _load_anew = CachingConfigRepository.__init__, ConfigRepository.load_config
_loaded: dict[Any, ConfigResult | None] = {}
_copies_anew = {kind: kind.__deepcopy__ for kind in (DictConfig, ListConfig)}
_list_anew, _compose_anew = hydras.create_defaults_list, Loader._compose_config_from_defaults_list
_lists: dict[Any, DefaultsList] = {}
_seen: dict[tuple[Any, ...], int] = {}
_composed: dict[int, tuple[DefaultsList, DictConfig]] = {}  # by the id of a list of files
_trees: dict[int, tuple[DictConfig, Any]] = {}  # without `hydra`, with the list whose id it is
_mode_anew, _modes = Hydra.get_mode, dict[Any, Any]()
_new = object.__new__
_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "configs")


def _copied(node: Any, memo: dict[int, Any]) -> Any:
    """Copy a node as omegaconf does, with its parent, but without the slow copy of every node's metadata."""
    return _copy_below(node, node.__dict__["_parent"], memo)


def _copy_below(node: Any, parent: Any, memo: dict[int, Any]) -> Any:
    kind, inside = type(node), node.__dict__
    if kind is UnionNode:
        made = copy.deepcopy(node, memo)
        made._set_parent(parent)
        return made
    old = inside["_metadata"]
    made, metadata = _new(kind), _new(type(old))
    below, about = made.__dict__, metadata.__dict__
    below.update(inside)
    about.update(old.__dict__)
    about["flags"] = dict(about["flags"])
    about["resolver_cache"] = copy.deepcopy(cache) if (cache := about["resolver_cache"]) else defaultdict(dict)
    below["_metadata"], below["_parent"], below["_flags_cache"] = metadata, parent, None
    content = inside.get("_content")
    if type(content) is dict:
        below["_content"] = {key: _copy_below(value, made, memo) for key, value in content.items()}
    elif type(content) is list:
        below["_content"] = [_copy_below(value, made, memo) for value in content]
    return made


def _reparented(self: Any) -> None:
    """Set the parent of nodes below that have another one; called after each file."""
    content = self.__dict__["_content"]
    nodes = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    for node in nodes:
        if node.__dict__["_parent"] is not self:
            node._set_parent(self)
        if type(node) in _copies_anew:
            _reparented(node)


def _repository_once(self: Any, delegate: Any) -> None:
    """Its sources may be replaced, but are not changed."""
    self.delegate, self.cache = copy.copy(delegate), {}


def _files(repo: IConfigRepository) -> tuple[Any, ...]:
    """Return the places of files, and the time at which each was changed."""
    found: list[Any] = []
    for source in repo.get_sources():
        found.append((source.provider, source.scheme(), source.path))
        if source.scheme() == "file" and os.path.isdir(source.path):
            found += _below(source.path)
    return tuple(found)


def _below(folder: str) -> Iterator[tuple[str, int]]:
    if folder.startswith(_OURS):
        files, inside = _of_ours(folder, os.stat(folder).st_mtime_ns)
        yield from files
        for name in inside:
            yield from _below(name)
        return
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                yield from _below(entry.path)
            else:
                yield entry.path, entry.stat().st_mtime_ns


@functools.lru_cache(maxsize=256)
def _of_ours(folder: str, changed: int) -> tuple[list[tuple[str, int]], list[str]]:
    """List one of the project's folders at its time of change; no test changes a file there in place."""
    with os.scandir(folder) as entries:
        there = sorted(entries, key=lambda entry: entry.name)
    inside = [entry.path for entry in there if entry.is_dir(follow_symlinks=False)]
    return [(entry.path, entry.stat().st_mtime_ns) for entry in there if entry.path not in inside], inside


def _result(kept: ConfigResult) -> ConfigResult:
    return replace(kept, header=dict(kept.header), config=copy.deepcopy(kept.config))


def _load_once(self: Any, config_path: str) -> ConfigResult | None:
    """Cache a file with its defaults list, if `_list_once` has seen its folders unchanged."""
    if "seen" not in self.__dict__:
        return _load_anew(self, config_path)  # type: ignore[no-any-return]
    key = (self.seen, config_path)
    if key not in _loaded:
        _loaded[key] = _load_anew(self, config_path)
    kept = _loaded[key]
    return kept and _result(kept)


def _map_where_used(overrides: Overrides, defaults: list[Any], self_added: bool) -> DictConfig | None:
    """Return all choices as a configuration, if a default interpolates another choice."""
    asked = any(default.is_interpolation() for default in defaults)
    return _map_anew(overrides, defaults, self_added) if asked else None


def _list_once(
    repo: IConfigRepository, config_name: str | None, overrides_list: list[Any], prepend_hydra: bool, skip_missing: bool
) -> DefaultsList:
    values = Overrides(repo, overrides_list).config_overrides
    choices = tuple(word.input_line for word in overrides_list if not any(word is value for value in values))
    files = _files(repo)
    if isinstance(repo, CachingConfigRepository):
        repo.delegate.seen = _seen.setdefault(files, len(_seen))  # type: ignore[attr-defined]
    key = (files, config_name, choices, prepend_hydra, skip_missing)
    if key not in _lists:
        _lists[key] = _list_anew(repo, config_name, overrides_list, prepend_hydra, skip_missing)
    return replace(_lists[key], config_overrides=values)


def _compose_once(loader: Any, defaults: list[Any], repo: IConfigRepository) -> DictConfig:
    if id(defaults) not in _composed:
        _composed[id(defaults)] = defaults, _compose_anew(loader, defaults, repo)  # type: ignore[assignment]
    return copy.deepcopy(_composed[id(defaults)][1])


def _mode_once(self: Hydra, config_name: str | None, overrides: list[str]) -> Any:
    """Cache the mode of a command, which Hydra composes it again for; only files and Hydra's keys count."""
    bare = [word.lstrip("+~") for word in overrides]
    if any(word.startswith("hydra") for word in bare):
        return _mode_anew(self, config_name, overrides)
    repo = self.config_loader.repository  # type: ignore[attr-defined]
    groups = (re.split("[@=]", word, maxsplit=1)[0] for word in bare)
    choices = [word for word, group in zip(overrides, groups, strict=True) if repo.group_exists(group)]
    key = (_files(repo), config_name, *choices)
    if key not in _modes:
        _modes[key] = _mode_anew(self, config_name, choices)
    return _modes[key]


@functools.cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def compose(config_name: str, words: list[str]) -> DictConfig:
    """Compose as `hydra.compose`, without setting and removing `hydra`, half of its time."""
    if any(word.lstrip("+~").startswith("hydra") for word in words):  # a key of `hydra`
        return hydras_compose(config_name, words)
    loader = GlobalHydra.instance().config_loader()
    assert isinstance(loader, Loader)
    try:
        parsed = _parser().parse_overrides(words)
        repo = CachingConfigRepository(loader.repository)
        loader.validate_sweep_overrides_legal(parsed, RunMode.RUN, from_shell=False)
        found = hydras.create_defaults_list(repo, config_name, parsed, prepend_hydra=True, skip_missing=False)
        if id(found.defaults) not in _trees:
            files = [file for file in found.defaults if (file.package or "").partition(".")[0] != "hydra"]
            tree = _compose_anew(loader, files, repo)
            tree.pop("hydra", None)  # set by other files
            _trees[id(found.defaults)] = tree, found.defaults
        cfg = copy.deepcopy(_trees[id(found.defaults)][0])
        OmegaConf.set_struct(cfg, True)
        loader._apply_overrides_to_config(found.config_overrides, cfg)
    except OmegaConfBaseException as error:
        raise ConfigCompositionException from error
    return cfg


def once() -> None:
    """Enable the cache in this process."""
    defaults_lists._create_interpolation_map = _map_where_used  # type: ignore[assignment]
    hydras.create_defaults_list = _list_once
    Loader._compose_config_from_defaults_list = _compose_once  # type: ignore[method-assign]
    CachingConfigRepository.__init__ = _repository_once  # type: ignore[method-assign]
    ConfigRepository.load_config = _load_once  # type: ignore[method-assign]
    Hydra.get_mode = _mode_once  # type: ignore[method-assign]
    for kind in _copies_anew:
        kind.__deepcopy__, kind._re_parent = _copied, _reparented  # type: ignore[method-assign]


def anew() -> None:
    """Disable the cache."""
    defaults_lists._create_interpolation_map = _map_anew
    hydras.create_defaults_list = _list_anew
    Loader._compose_config_from_defaults_list = _compose_anew  # type: ignore[method-assign]
    CachingConfigRepository.__init__ = _repository_anew  # type: ignore[method-assign]
    ConfigRepository.load_config = _load_anew  # type: ignore[method-assign]
    Hydra.get_mode = _mode_anew  # type: ignore[method-assign]
    for kind, copied in _copies_anew.items():
        kind.__deepcopy__, kind._re_parent = copied, _parents_anew  # type: ignore[method-assign]
