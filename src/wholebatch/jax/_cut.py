"""Cut: which rows a piece holds.

    N rows = n pieces of p rows, and a remainder of r < p

The equal pieces take every n-th row, so that rows stay on the device that holds them where a batch is sharded along
its leading axis. With a remainder they take neighbours, which are sliced from the batch without a copy of it.
"""

import jax
from jax import Array, lax
from jax import numpy as jnp

from ._tree import Tree


class Cut:
    """The plan of one batch.

    Args:
        rows: rows of the batch.
        micro_batch_size: rows of a piece, at most.
        num_micro_batches: the number of pieces, instead.
    """

    def __init__(self, rows: int, micro_batch_size: int | None, num_micro_batches: int | None) -> None:
        wanted = -(-rows // (num_micro_batches or 1)) if micro_batch_size is None else micro_batch_size
        self.rows = rows
        self.size = min(wanted, rows)
        self.equal_pieces, self.remainder = divmod(rows, self.size)

    @property
    def pieces(self) -> int:
        """How many there are, with the remainder."""
        return self.equal_pieces + bool(self.remainder)

    @property
    def sizes(self) -> list[int]:
        """Rows of each piece, in the order in which they are added."""
        return [self.size] * self.equal_pieces + [self.remainder] * bool(self.remainder)

    def piece(self, batch: Tree, i: Array | int) -> Tree:
        """The i-th of the equal pieces."""
        return jax.tree.map(lambda leaf: self._rows_of_piece(leaf, i), batch)

    def tail(self, batch: Tree) -> Tree:
        """The remainder."""
        return jax.tree.map(lambda leaf: leaf[self.rows - self.remainder :], batch)

    def in_row_order(self, pieces: Array, tail: Array | None) -> Array:
        """What the pieces returned for their rows (one or several entries a row), in the order of the batch's rows."""
        per_row = pieces.shape[1] // self.size
        by_row = pieces.reshape(self.equal_pieces, self.size, per_row, *pieces.shape[2:])
        if not self.remainder:
            by_row = jnp.swapaxes(by_row, 0, 1)
        flat = by_row.reshape(-1, *pieces.shape[2:])
        return flat if tail is None else jnp.concatenate([flat, tail])

    def _rows_of_piece(self, leaf: Array, i: Array | int) -> Array:
        if self.remainder:
            return lax.dynamic_slice_in_dim(leaf, i * self.size, self.size)
        spread = leaf.reshape(self.size, self.equal_pieces, *leaf.shape[1:])
        piece: Array = lax.dynamic_index_in_dim(spread, i, axis=1, keepdims=False)
        return piece
