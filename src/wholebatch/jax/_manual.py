"""A function on every device: manual over some axes of a mesh, with all others as they were.

Axes may be explicit, which makes them part of every array's type. `jax.shard_map` gathers what is sharded over explicit
axes other than its own, so these cross its border as automatic ones (a cast, by which nothing moves) and are explicit
again inside of it.

Whether a value is the same on all devices is not left to JAX's types (`check_vma`): under them a loss that holds a scan
of its own would have to know that it is sharded. Without them gradients are local, which is what a sum needs.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec, use_abstract_mesh

from ._tree import Tree

Names = tuple[str, ...]

Function = Callable[[Tree, Tree], tuple[Tree, Tree]]
"""Takes and returns arrays that are the same on all devices, and arrays of which each device has its rows."""


def on_every_device(fun: Function, axes: Names, mesh: Mesh | AbstractMesh) -> Function:
    """The function of all rows that runs `fun` on every device with the rows that are there.

    Args:
        fun: what is to be run.
        axes: those that rows are sharded over.
        mesh: all devices.
    """
    explicit = _explicit_axes(mesh)
    others, typed_axes = explicit - {*axes}, tuple(axis for axis in axes if axis in explicit)
    border = _with_types(mesh, others, AxisType.Auto)
    specs = _spec(()), _spec((axes,))

    def mapped(fun: Function) -> Function:
        manual: Function = jax.shard_map(
            fun, mesh=border, in_specs=specs, out_specs=specs, axis_names={*axes}, check_vma=False
        )
        return manual

    def typed(same: Tree, rows: Tree) -> tuple[Tree, Tree]:
        given = jax.tree.map(lambda leaf: _without(axes, spec_of(leaf)), (same, rows))
        returned: Any = None

        def with_explicit_axes(*inputs: Tree) -> tuple[Tree, Tree]:
            nonlocal returned
            with use_abstract_mesh(_with_types(jax.sharding.get_abstract_mesh(), others, AxisType.Explicit)):
                outputs = fun(*_resharded(inputs, given))
                returned = jax.tree.map(spec_of, outputs)
            at_border: tuple[Tree, Tree] = _resharded(outputs, _without_each(others, returned))
            return at_border

        with use_abstract_mesh(_abstract(border)):
            inputs = _resharded((same, rows), _without_each(others, (given[0], _by_row(typed_axes, given[1]))))
            outputs = mapped(with_explicit_axes if others else fun)(*inputs)
        if others:
            with use_abstract_mesh(_abstract(mesh)):
                outputs = _resharded(outputs, (returned[0], _by_row(typed_axes, returned[1])))
        return outputs

    return typed if explicit else mapped(fun)


def spec_of(leaf: Any) -> PartitionSpec:
    """What an array's type says of its sharding, an entry for each of its axes; nothing but for explicit mesh axes."""
    spec: PartitionSpec = jax.typeof(leaf).sharding.spec
    return spec


def names_in(entry: str | Names | None) -> Names:
    """The mesh axes that an entry of a spec names."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _explicit_axes(mesh: Mesh | AbstractMesh) -> set[str]:
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in types if kind is AxisType.Explicit}


def _with_types(mesh: Any, axes: Collection[str], kind: AxisType) -> Any:
    """The same devices, with axes of another type."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    changed = tuple(kind if name in axes else before for name, before in types)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=changed)
    return mesh.update_axis_types(dict(zip(mesh.axis_names, changed, strict=True)))


def _abstract(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    return mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh


def _spec(entries: Iterable[Any]) -> PartitionSpec:
    spec: PartitionSpec = PartitionSpec(*entries)  # type: ignore[no-untyped-call]
    return spec


def _without(axes: Collection[str], spec: PartitionSpec) -> PartitionSpec:
    return _spec(tuple(name for name in names_in(entry) if name not in axes) for entry in spec)


def _without_each(axes: Collection[str], specs: Tree) -> Tree:
    return jax.tree.map(lambda spec: _without(axes, spec), specs)


def _by_row(axes: Names, specs: Tree) -> Tree:
    """The leading axis over these."""
    return jax.tree.map(lambda spec: _spec((axes, *spec[1:])), specs)


def _resharded(tree: Tree, specs: Tree) -> Any:
    def move(leaf: Array, spec: PartitionSpec) -> Array:
        moved: Array = jax.reshard(leaf, spec)  # type: ignore[no-untyped-call]
        return moved

    return jax.tree.map(move, tree, specs)
