"""A pass of the tests composes some two thousand times, a third of its time, and mostly the same files: what a choice
of groups gives is kept while its files are the same. Values are set on a copy, as Hydra sets them; errors are found
anew each time. Commands that start Python anew compose as they always do.
"""

import copy
import os
from dataclasses import replace
from typing import Any

from hydra._internal import config_loader_impl as hydras
from hydra._internal import defaults_list as defaults_lists
from hydra._internal.config_repository import IConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig

Loader = hydras.ConfigLoaderImpl
Plugins.instance()  # imports the sources of files, each as a class that no import statement finds
Files: Any = SourcesRegistry.instance().resolve("file")
Packages: Any = SourcesRegistry.instance().resolve("pkg")
_read_anew, _read_package_anew = Files.load_config, Packages.load_config
_read: dict[Any, ConfigResult] = {}
_map_anew = defaults_lists._create_interpolation_map
_list_anew, _compose_anew = hydras.create_defaults_list, Loader._compose_config_from_defaults_list
_lists: dict[Any, DefaultsList] = {}
_composed: dict[int, tuple[DefaultsList, DictConfig]] = {}  # by the id of a list of files


def _files(repo: IConfigRepository) -> tuple[Any, ...]:
    """Where files are read, and when each was last changed."""
    found: list[Any] = []
    for source in repo.get_sources():
        found.append((source.provider, source.scheme(), source.path))
        if source.scheme() == "file":
            for folder, _, names in sorted(os.walk(source.path)):
                found += [(folder, name, os.stat(os.path.join(folder, name)).st_mtime_ns) for name in sorted(names)]
    return tuple(found)


def _read_once(source: ConfigSource, config_path: str) -> ConfigResult:
    path = os.path.realpath(os.path.join(source.path, source._normalize_file_name(config_path)))
    if not os.path.isfile(path):
        return _read_anew(source, config_path)  # type: ignore[no-any-return]
    key = (path, source.path, source.provider, os.stat(path).st_mtime_ns)
    if key not in _read:
        _read[key] = _read_anew(source, config_path)
    return copy.deepcopy(_read[key])


def _read_package_once(source: ConfigSource, config_path: str) -> ConfigResult:
    key = (source.path, source.provider, config_path)
    if key not in _read:
        _read[key] = _read_package_anew(source, config_path)
    return copy.deepcopy(_read[key])


def _map_where_used(overrides: Overrides, defaults: list[Any], self_added: bool) -> DictConfig | None:
    """All choices, as a configuration: only a default that names another's choice is looked up in it."""
    asked = any(default.is_interpolation() for default in defaults)
    return _map_anew(overrides, defaults, self_added) if asked else None


def _list_once(
    repo: IConfigRepository, config_name: str | None, overrides_list: list[Any], prepend_hydra: bool, skip_missing: bool
) -> DefaultsList:
    values = Overrides(repo, overrides_list).config_overrides
    choices = tuple(word.input_line for word in overrides_list if not any(word is value for value in values))
    key = (_files(repo), config_name, choices, prepend_hydra, skip_missing)
    if key not in _lists:
        _lists[key] = _list_anew(repo, config_name, overrides_list, prepend_hydra, skip_missing)
    return replace(_lists[key], config_overrides=values)


def _compose_once(loader: Any, defaults: list[Any], repo: IConfigRepository) -> DictConfig:
    if id(defaults) not in _composed:
        _composed[id(defaults)] = defaults, _compose_anew(loader, defaults, repo)  # type: ignore[assignment]
    return copy.deepcopy(_composed[id(defaults)][1])


def once() -> None:
    """From now on in this process."""
    Files.load_config, Packages.load_config = _read_once, _read_package_once
    defaults_lists._create_interpolation_map = _map_where_used  # type: ignore[assignment]
    hydras.create_defaults_list = _list_once
    Loader._compose_config_from_defaults_list = _compose_once  # type: ignore[method-assign]


def anew() -> None:
    """As Hydra does it."""
    Files.load_config, Packages.load_config = _read_anew, _read_package_anew
    defaults_lists._create_interpolation_map = _map_anew
    hydras.create_defaults_list = _list_anew
    Loader._compose_config_from_defaults_list = _compose_anew  # type: ignore[method-assign]
