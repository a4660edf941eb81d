"""The book of one batch: what every piece contributed, and how its gradient is weighted.

    L = Σ_terms (Σ_k T_k) / (Σ_k C_k)

A denominator that is known before the first backward (rows, a Sum's 1, `counts=`, the only piece's) goes
into the seed of each piece's backward, so nothing is left to divide. One that has to be learned from the
pieces is divided out at the end, as `Totals.factor`. There can be one such denominator, because sums with
different denominators cannot share a buffer; where terms of both kinds meet, they get a backward each.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .._errors import CountError, LossError
from ._loss import Count, Number, Per, Reading, Term
from ._totals import Column, Totals, is_zero, reciprocal


class Pass(NamedTuple):
    """The tensors of one backward and the seeds that weight them."""

    values: list[Tensor]
    seeds: list[Tensor]


class Ledger:
    """Collects readings, piece by piece.

    Args:
        rows: rows of the whole batch, where they are known beforehand.
        num_pieces: the number of pieces, where it is known beforehand; a single one's counts are the batch's.
    """

    counts: dict[str, Count] | None = None
    """Each term's count over the whole batch, where `counts=` gave them."""

    def __init__(self, rows: int | None, num_pieces: int | None) -> None:
        self._rows = rows
        self._num_pieces = num_pieces
        self._terms: dict[str, Column] = {}
        self._metrics: dict[str, Column] = {}
        self._learned: str | None = None
        self._seeds: dict[tuple[Number, torch.dtype, torch.device], Tensor] = {}
        self.pieces = 0

    def enter(self, reading: Reading) -> tuple[Pass, Pass]:
        """Write a piece down; returns its backward, and another for what `Totals.factor` must not touch."""
        if not self.pieces:
            self._terms = {name: Column(term.per, self._num_pieces) for name, term in reading.terms.items()}
            self._metrics = {name: Column(metric.per, self._num_pieces) for name, metric in reading.metrics.items()}
            self._learned = self._learned_denominator(reading.terms)
        self.pieces += 1
        _append("terms", self._terms, reading.terms, self.pieces)
        _append("metrics", self._metrics, reading.metrics, self.pieces)

        main, aside = Pass([], []), Pass([], [])
        counting = {name: term for name, term in reading.terms.items() if not is_zero(term.count)}
        for name, term in counting.items():
            if term.value.requires_grad:
                denominator = self._known_denominator(name, term)
                one_of = main if denominator is None or self._learned is None else aside
                one_of.values.append(term.value)
                one_of.seeds.append(self._seed(term, 1 if denominator is None else denominator))
        if counting and not main.values and not aside.values:
            raise LossError(
                f"the loss of piece {self.pieces} has no graph: nothing in it depends on a tensor that requires "
                "grad" + ("" if torch.is_grad_enabled() else " (gradients are switched off by torch.no_grad)")
            )
        return main, aside

    @property
    def has_means_over_rows(self) -> bool:
        """Whether a term was a scalar."""
        return any(column.per is Per.ROWS for column in self._terms.values())

    def totals(self) -> Totals:
        """The sums over all pieces."""
        return Totals(
            {name: column.total() for name, column in self._terms.items()},
            {name: column.total() for name, column in self._metrics.items()},
            self._learned,
        )

    def _known_denominator(self, name: str, term: Term) -> Count | None:
        if term.per is Per.NOTHING:
            return 1
        if term.per is Per.ROWS:
            return self._rows
        if self.counts is not None:
            if name not in self.counts:
                raise CountError(f"counts= gives no count for term {name!r}, only for {', '.join(self.counts)}")
            return self.counts[name]
        return term.count if self._num_pieces == 1 else None

    def _learned_denominator(self, terms: dict[str, Term]) -> str | None:
        """The term whose count has to be learned; terms divided by the rows share one."""
        unknown = [name for name, term in terms.items() if self._known_denominator(name, term) is None]
        own = [name for name in unknown if terms[name].per is Per.OWN_COUNT]
        if len(own) > 1 or (own and len(own) < len(unknown)):
            raise CountError(
                f"terms {', '.join(map(repr, unknown))} are divided by different counts, which must be known before "
                "the first backward: give counts= to .backward or .step, a function of a piece that returns each "
                f"term's count, such as lambda piece: {{{', '.join(f'{name!r}: ...' for name in own)}}}"
            )
        return unknown[0] if unknown else None

    def _seed(self, term: Term, denominator: Count) -> Tensor:
        """d objective / d value = weight / denominator, and 0 for a piece that counts nothing."""
        value, count = term.value, term.count
        share = term.weight * reciprocal(denominator)
        if isinstance(count, Tensor):
            return torch.where(count.to(value.device) > 0, share, 0.0).to(value)
        if isinstance(share, Tensor):
            return share.to(value)
        key = (share, value.dtype, value.device)
        if key not in self._seeds:
            self._seeds[key] = torch.full_like(value, share, requires_grad=False)
        return self._seeds[key]


def _append(what: str, columns: dict[str, Column], terms: dict[str, Term], piece: int) -> None:
    if columns.keys() != terms.keys():
        name = next(iter(columns.keys() ^ terms.keys()))
        present, absent = (1, piece) if name in columns else (piece, 1)
        raise LossError(
            f"{what} differ between pieces: {name!r} is in piece {present} and not in piece {absent}; return it "
            "for every piece, with count 0 where there is nothing to count"
        )
    for name, term in terms.items():
        if term.per is not columns[name].per:
            raise LossError(
                f"{name!r} is divided by {columns[name].per.value} in piece 1 and by {term.per.value} in piece "
                f"{piece}: return the same kind of loss for every piece"
            )
        columns[name].append(term)
