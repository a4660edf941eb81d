"""The book of one batch: what every piece contributed to each term and metric."""

from .._errors import LossError
from .._terms import Per
from ._loss import Reading, Term
from ._totals import Column, Totals


class Ledger:
    """Collects readings, piece by piece.

    Args:
        num_pieces: how many are expected, where that is known.
    """

    def __init__(self, num_pieces: int | None = None) -> None:
        self._num_pieces = num_pieces
        self._terms: dict[str, Column] = {}
        self._metrics: dict[str, Column] = {}
        self.graphless: list[int] = []
        self.pieces = 0
        self.rows: int | None = 0

    def enter(self, reading: Reading, rows: int | None) -> None:
        """Write a piece of `rows` rows down; they are None where they cannot be told."""
        if not self.pieces:
            self._terms = {name: Column(term.per, self._num_pieces) for name, term in reading.terms.items()}
            self._metrics = {name: Column(metric.per, self._num_pieces) for name, metric in reading.metrics.items()}
        self.pieces += 1
        self.rows = None if rows is None or self.rows is None else self.rows + rows
        _append("terms", self._terms, reading.terms, self.pieces)
        if self._metrics or reading.metrics:
            _append("metrics", self._metrics, reading.metrics, self.pieces)

    @property
    def counts_rows_only(self) -> bool:
        """Whether there were scalars and no `Mean`, whose author would know what else there is to count."""
        kinds = {column.per for column in self._terms.values()}
        return Per.ROWS in kinds and Per.OWN_COUNT not in kinds

    def totals(self) -> Totals:
        """The sums over all pieces."""
        return Totals(
            {name: column.total() for name, column in self._terms.items()},
            {name: column.total() for name, column in self._metrics.items()},
        )


def _append(what: str, columns: dict[str, Column], terms: dict[str, Term], piece: int) -> None:
    if columns.keys() != terms.keys():
        name = next(iter(columns.keys() ^ terms.keys()))
        present, absent = (1, piece) if name in columns else (piece, 1)
        raise LossError(
            f"{what} differ between pieces: {name!r} is in piece {present} and not in piece {absent}; return it "
            "for every piece, with count 0 where there is nothing to count"
        )
    for name, term in terms.items():
        column = columns[name]
        if term.per is not column.per:
            raise LossError(
                f"{name!r} is divided by {column.per.value} in piece 1 and by {term.per.value} in piece "
                f"{piece}: return the same kind of loss for every piece"
            )
        column.append(term)
