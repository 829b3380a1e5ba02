"""Keys of the memory that holds the values of nodes: two values share memory if they share a key.

A tensor has the key of its storage, as its views have. A tensor of unknown layout may be in any
memory: its key is ANYWHERE.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ...torch_private import FakeTensor, get_unwrapped, is_functorch_wrapped_tensor
from .canonical import value

# The key of unknown memory. It may be any memory, so users of keys have to ask for it apart.
ANYWHERE = -1


def is_plain(tensor: Any) -> bool:
    """Return whether a tensor is an ordinary dense one, not a DTensor, a wrapper of vmap, ..."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter, FakeTensor)
        and not is_functorch_wrapped_tensor(tensor)
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor within the wrappers of torch.func transforms."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def memory(nodes: Iterable[Any]) -> set[int]:
    """Return the keys of the memory of nodes or tensors; other values have none."""
    return {key for node in pytree.tree_leaves(list(nodes)) for key in _storages(value(node), node)}


def _storages(known: Any, node: Any) -> set[int]:
    if isinstance(known, (tuple, list)):
        return {key for item in known for key in _storages(item, item)}
    if isinstance(known, Tensor):
        known = unwrapped(known)
        return {known.untyped_storage()._cdata} if is_plain(known) else {ANYWHERE}
    # A node without an example value may be a tensor.
    return {ANYWHERE} if known is None and isinstance(node, fx.Node) else set()
