"""Batches as trees: tensors at the leaves, containers that people use to hold them.

Tuples, named tuples, lists, dicts, any mapping (a tokenizer's batch, a model's output) and dataclasses are
containers; everything else is a leaf. A container is rebuilt as the type it was, and left alone where
nothing in it changed.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor


def map_tensors(function: Callable[[Tensor], Tensor], node: Any) -> Any:
    """The same tree with `function` applied to every tensor."""
    if isinstance(node, Tensor):
        return function(node)
    children = _children(node)
    if not children:
        return node
    mapped = [map_tensors(function, child) for child in children.values()]
    if all(new is old for new, old in zip(mapped, children.values(), strict=True)):
        return node
    return _rebuild(node, dict(zip(children, mapped, strict=True)))


def tensors(node: Any, path: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a tree with the path that leads to it, such as `batch["labels"]`."""
    if isinstance(node, Tensor):
        yield path, node
        return
    for key, child in _children(node).items():
        yield from tensors(child, path + _step(node, key))


def disassembled(node: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """The tensors that have an axis, and a function that builds the same tree around others in their place.

    The tree is walked here, once, and not again for each piece.
    """
    parts: list[Tensor] = []
    build = _builder(node, parts)
    return parts, build or (lambda _: node)


def _builder(node: Any, parts: list[Tensor]) -> Callable[[Sequence[Tensor]], Any] | None:
    """None for what stays as it is."""
    if isinstance(node, Tensor):
        if not node.dim():
            return None
        parts.append(node)
        return itemgetter(len(parts) - 1)
    children = _children(node)
    builders = {key: _builder(child, parts) for key, child in children.items()}
    if not any(builders.values()):
        return None
    built = [build or _always(children[key]) for key, build in builders.items()]
    if type(node) is tuple:
        return lambda others: tuple([build(others) for build in built])
    return lambda others: _rebuild(node, dict(zip(children, [build(others) for build in built], strict=True)))


def _always(child: Any) -> Callable[[Sequence[Tensor]], Any]:
    return lambda _: child


def _children(node: Any) -> dict[Any, Any]:
    if isinstance(node, Mapping):
        return dict(node)
    if isinstance(node, tuple | list):
        return dict(enumerate(node))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    return {}


def _rebuild(node: Any, children: dict[Any, Any]) -> Any:
    if type(node) in (dict, tuple, list):
        return children if type(node) is dict else type(node)(children.values())
    if isinstance(node, Mapping):
        return _rebuild_mapping(node, children)
    if hasattr(node, "_make"):  # a named tuple
        return node._make(children.values())
    if isinstance(node, tuple | list):
        return type(node)(children.values())
    rebuilt = copy.copy(node)
    for name, child in children.items():
        object.__setattr__(rebuilt, name, child)  # reaches the fields of a frozen dataclass too
    return rebuilt


def _rebuild_mapping(node: Any, children: dict[Any, Any]) -> Any:
    """A copy keeps what a mapping carries besides its items, such as a tokenizer's encodings.

    Attributes that mirror an item follow it. A mapping whose copy shares its storage becomes a plain dict.
    """
    if not hasattr(node, "__setitem__"):
        return children
    rebuilt = copy.copy(node)
    mirrored = getattr(rebuilt, "__dict__", {})
    for key, child in children.items():
        own = node[key]
        rebuilt[key] = child
        if node[key] is not own:
            node[key] = own
            return children
        if mirrored.get(key) is own:
            mirrored[key] = child
    return rebuilt


def _step(node: Any, key: Any) -> str:
    if isinstance(node, Mapping):
        return f"[{key!r}]".replace("'", '"')
    if hasattr(node, "_fields"):
        return f".{node._fields[key]}"
    if isinstance(node, tuple | list):
        return f"[{key}]"
    return f".{key}"
