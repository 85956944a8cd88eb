"""Trees of containers."""

from __future__ import annotations

from typing import Any

from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_map_only, tree_unflatten

__all__ = ["keystr", "tree_flatten", "tree_flatten_with_path", "tree_leaves", "tree_map_only", "tree_unflatten"]


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree, in order."""
    return tree_flatten(tree)[0]
