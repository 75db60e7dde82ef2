"""Replace nodes of another class, and lists by groups of keys or groups by lists, when configurations are merged.

OmegaConf merges the keys of two classes, and refuses a list for a group, such as data.augment=[...]. Hydra calls
`merge_with` for each file and override and has no option for this, so the method itself is replaced here.
"""

from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.basecontainer import BaseContainer

_merge_with = BaseContainer.merge_with


def _merge(self: BaseContainer, *others: Any) -> None:
    for other in others:
        new = other if OmegaConf.is_config(other) or other is None else OmegaConf.create(other)
        parent = self._get_parent()
        if isinstance(parent, DictConfig) and _is_replaced(self, new):
            parent._set_item_impl(self._key(), new)
        else:
            _remove_replaced(self, new)
            _merge_with(self, new)


def _is_replaced(old: Any, new: Any) -> bool:
    if {type(old), type(new)} == {DictConfig, ListConfig}:
        return True
    targets = [tree._get_node("_target_", validate_access=False) if _has_keys(tree) else None for tree in (old, new)]
    return None not in targets and targets[0] != targets[1]


def _remove_replaced(old: Any, new: Any) -> None:
    if not _has_keys(old) or not _has_keys(new):
        return
    for key in new:
        before, after = (tree._get_node(key, validate_access=False) for tree in (old, new))
        if _is_replaced(before, after):
            old._set_item_impl(key, None)
        else:
            _remove_replaced(before, after)


def _has_keys(node: Any) -> bool:
    return isinstance(node, DictConfig) and not (node._is_none() or node._is_missing() or node._is_interpolation())


BaseContainer.merge_with = _merge  # type: ignore[method-assign]
