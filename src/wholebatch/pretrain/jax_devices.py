"""The devices that JAX sees: rows are shared out, everything else is copied."""

from typing import Any

import jax
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._errors import OptionError


class Devices:
    """Where rows are shared out and everything else is copied to, if there are several devices.

    Args:
        batch_size: rows of a batch.
    """

    def __init__(self, batch_size: int) -> None:
        self.count = jax.device_count()
        kind = jax.devices()[0].device_kind
        self.name = kind if self.count == 1 else f"{self.count} x {kind}"
        self.options: dict[str, Any] = {}
        if self.count == 1:
            return
        if batch_size % self.count:
            raise OptionError(
                f"--batch-size {batch_size} cannot be shared out evenly over {self.count} devices: give a multiple of "
                f"{self.count}"
            )
        mesh = jax.make_mesh((self.count,), ("data",), axis_types=(AxisType.Auto,))
        self.options = {"data_axis": "data", "mesh": mesh}
        self._everywhere, self._by_rows = (
            NamedSharding(mesh, PartitionSpec(*axes))  # type: ignore[no-untyped-call]
            for axes in ((), ("data",))
        )

    def copied(self, tree: Any) -> Any:
        """On all of them."""
        return jax.device_put(tree, self._everywhere) if self.options else tree

    def shared(self, rows: Array) -> Array:
        """A share of the rows on each."""
        return jax.device_put(rows, self._by_rows) if self.options else rows
