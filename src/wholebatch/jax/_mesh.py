"""Agree and reduce: each device along a mesh axis sums its own rows, and the sums cross the wire once.

    G = Σ_devices Σ_k ∇T_k      T = Σ_devices Σ_k T_k      C = Σ_devices Σ_k C_k

The line runs on each device as it would on the only one. Nothing moves between them but what `Devices.sum` is given.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, Mesh

from .._errors import BatchError, OptionError, OptionTypeError
from ._cut import Cut
from ._keys import fold_in_each
from ._manual import names_in, on_every_device, spec_of
from ._tree import Tree

Axis = str | tuple[str, ...]

Line = Callable[..., tuple[Any, Tree]]
"""Returns a tree of arrays, and flags (a tree prefix) of those that are a device's own and not the same on all."""


class Devices(Protocol):
    """Who shares the rows of a batch."""

    number: int

    def cut(self, rows: int, micro_batch_size: int | None, num_micro_batches: int | None) -> Cut:
        """The plan of one device's rows."""

    def run(self, line: Line, differentiated: Tree, batch: list[Array], others: Tree) -> Any:
        """What the line returns for these, put together."""

    def sum(self, tree: Tree) -> Tree:
        """Over all devices, in one reduction; inside `run`."""

    def own_keys(self, keys: Tree) -> Tree:
        """Random keys that no other device has; inside `run`."""


class OneDevice:
    """All rows are here, or wherever the compiler puts them."""

    number = 1

    def cut(self, rows: int, micro_batch_size: int | None, num_micro_batches: int | None) -> Cut:
        return Cut(rows, micro_batch_size, num_micro_batches)

    def run(self, line: Line, differentiated: Tree, batch: list[Array], others: Tree) -> Any:
        return line(differentiated, batch, others)[0]

    def sum(self, tree: Tree) -> Tree:
        return tree

    def own_keys(self, keys: Tree) -> Tree:
        return keys


class DevicesAlong:
    """The devices along one axis of a mesh, or several.

    Args:
        axes: their names.
        mesh: the mesh.
    """

    def __init__(self, axes: tuple[str, ...], mesh: Mesh | AbstractMesh) -> None:
        self._axes, self._mesh = axes, mesh
        self.number = 1
        for axis in axes:
            self.number *= mesh.shape[axis]

    def cut(self, rows: int, micro_batch_size: int | None, num_micro_batches: int | None) -> Cut:
        if rows % self.number:
            raise BatchError(
                f"the batch has {rows} rows, which {self} cannot share equally: give a multiple of {self.number}, "
                "filled up with rows that do not count (Mean.of(losses, where=mask))"
            )
        size = Cut(rows, micro_batch_size, num_micro_batches).size
        if size % self.number:
            asked = f"{micro_batch_size=}" if num_micro_batches is None else f"{num_micro_batches=}"
            raise OptionError(
                f"{asked} makes pieces of {size} rows, which {self} cannot share equally: sizes are those of all "
                f"devices together, so give a micro_batch_size that is a multiple of {self.number}"
            )
        return Cut(rows // self.number, size // self.number, None)

    def run(self, line: Line, differentiated: Tree, batch: list[Array], others: Tree) -> Any:
        self._refuse_rows_elsewhere(batch)
        own: list[bool] = []
        tree: Any = None

        def on_device(inputs: Tree, batch: list[Array]) -> tuple[list[Array], list[Array]]:
            nonlocal own, tree
            differentiated, others = inputs
            returned, flags = line(differentiated, batch, others)
            leaves, tree = jax.tree.flatten(returned)
            own = jax.tree.leaves(jax.tree.broadcast(flags, returned))
            return _chosen(leaves, [not flag for flag in own]), _chosen(leaves, own)

        mapped = on_every_device(on_device, self._axes, self._mesh)
        same, by_device = map(iter, jax.jit(mapped)((differentiated, others), batch))
        whole = jax.tree.unflatten(tree, [next(by_device if flag else same) for flag in own])
        return whole._replace(gradients=jax.tree.map(self._sharded_as, whole.gradients, differentiated))

    def sum(self, tree: Tree) -> Tree:
        return lax.psum(tree, self._axes)  # type: ignore[no-untyped-call]

    def own_keys(self, keys: Tree) -> Tree:
        index = lax.axis_index(self._axes)
        return jax.tree.map(lambda leaf: fold_in_each(leaf, index), keys)

    def _sharded_as(self, gradient: Array, parameter: Any) -> Array:
        """As JAX would have it, where a parameter's type says that the data axis holds shards of it."""
        sharding = jax.typeof(parameter).sharding
        if not {name for entry in sharding.spec for name in names_in(entry)} & {*self._axes}:
            return gradient
        resharded: Array = jax.reshard(gradient, sharding)  # type: ignore[no-untyped-call]
        return resharded

    def _refuse_rows_elsewhere(self, batch: list[Array]) -> None:
        """Explicit axes are part of an array's type: rows that are sharded over others would have to be moved."""
        for leaf in batch:
            rows = names_in(spec_of(leaf)[0])
            if rows and rows != self._axes:
                raise BatchError(
                    f"an array of the batch, {jax.typeof(leaf)}, has its rows sharded over {_quoted(rows)}, but "
                    f"data_axis={_quoted(self._axes)}: jax.reshard it, or name the axis that holds the rows"
                )

    def __str__(self) -> str:
        return f"the {self.number} devices along {_quoted(self._axes)}"


def devices_for(data_axis: Axis | None, mesh: Mesh | AbstractMesh | None) -> Devices:
    """The devices that share a batch, by the options of a call.

    Args:
        data_axis: the mesh axis that rows are sharded over, or several.
        mesh: the mesh; None for the one around the call.
    """
    if data_axis is None:
        return OneDevice()
    axes = names_in(data_axis)
    around = jax.sharding.get_abstract_mesh()
    if mesh is None:
        mesh = _mesh_of_with_statement() if around.empty else around
    elif not around.empty:
        if around.shape != mesh.shape:
            raise OptionError(
                f"mesh= has the axes {_sized(mesh)}, but this is called under jax.set_mesh of {_sized(around)}"
            )
        mesh = around  # whose axes may be manual here
    if mesh.empty:
        raise OptionError(
            f"data_axis={_quoted(axes)} names an axis of a mesh, but there is no mesh: call this under "
            "jax.set_mesh(mesh), or give mesh="
        )
    for axis in axes:
        if axis not in mesh.axis_names:
            raise OptionError(f"data_axis={axis!r} is not an axis of the mesh, which has {_quoted(mesh.axis_names)}")
        if dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[axis] is AxisType.Manual:
            raise OptionError(
                f"data_axis={axis!r} is manual here, inside of a jax.shard_map over it: call this outside of it"
            )
    return DevicesAlong(axes, mesh)


def check_axis(data_axis: Any, mesh: Any) -> None:
    """Refuse a data axis or a mesh that cannot be meant, before any call."""
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise OptionTypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    if data_axis is None:
        if mesh is not None:
            raise OptionError(
                "mesh= was given without data_axis=: name the axis that rows are sharded over, of "
                f"{_quoted(mesh.axis_names)}"
            )
        return
    names = [data_axis] if isinstance(data_axis, str) else data_axis
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise OptionTypeError(f"data_axis must be the name of a mesh axis, or several, got {data_axis!r}")


def _mesh_of_with_statement() -> Mesh:
    from jax._src.mesh import thread_resources  # nothing public tells of it

    return thread_resources.env.physical_mesh


def _sized(mesh: Mesh | AbstractMesh) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh.shape.items())


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _chosen(leaves: list[Array], flags: list[bool]) -> list[Array]:
    return [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag]
