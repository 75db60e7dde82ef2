"""Nodes that replace earlier ones in place of being merged with them: a node of another class, whose keys are other
ones, and a list in place of a group of keys or a group in place of a list, as data.augment may be either.

OmegaConf merges the first and refuses the second; this replaces its method that Hydra calls for each file and override.
"""

from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.basecontainer import BaseContainer

_merge_with = BaseContainer.merge_with


def _replacing(self: BaseContainer, *others: Any) -> None:
    for other in others:
        new = other if OmegaConf.is_config(other) or other is None else OmegaConf.create(other)
        parent = self._get_parent()
        if isinstance(parent, DictConfig) and _differ(self, new):
            parent._set_item_impl(self._key(), new)
        else:
            _make_way(self, new)
            _merge_with(self, new)


def _differ(old: Any, new: Any) -> bool:
    if {type(old), type(new)} == {DictConfig, ListConfig}:
        return True
    targets = [tree._get_node("_target_", validate_access=False) if _has_keys(tree) else None for tree in (old, new)]
    return None not in targets and targets[0] != targets[1]


def _make_way(old: Any, new: Any) -> None:
    """Empties what of `old` is of another kind in `new`."""
    if not _has_keys(old) or not _has_keys(new):
        return
    for key in new:
        before, after = (tree._get_node(key, validate_access=False) for tree in (old, new))
        if _differ(before, after):
            old._set_item_impl(key, None)
        else:
            _make_way(before, after)


def _has_keys(node: Any) -> bool:
    return isinstance(node, DictConfig) and not (node._is_none() or node._is_missing() or node._is_interpolation())


BaseContainer.merge_with = _replacing  # type: ignore[method-assign]
