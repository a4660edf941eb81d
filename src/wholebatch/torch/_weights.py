"""How the gradient of each piece is weighted.

    L = Σ_terms (Σ_k T_k) / (Σ_k C_k)

A denominator that is known before the first backward (rows, a Sum's 1, `counts=`, the only piece's) goes into
the seed of each piece's backward, so nothing is left to divide. One that has to be learned from the pieces is
divided out at the end, as `factor`. There can be one such denominator, because sums with different
denominators cannot share a buffer; where terms of both kinds meet, they get a backward each.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .._errors import CountError, LossError
from .._terms import Per
from ._loss import Count, Number, Reading, Term
from ._totals import Totals, is_positive, is_zero, reciprocal


class Pass(NamedTuple):
    """The tensors of one backward and the seeds that weight them."""

    values: list[Tensor]
    seeds: list[Tensor]

    def carrying(self, losses: list[Tensor]) -> "Pass":
        """The same backward, and that of other losses with it."""
        return Pass(self.values + losses, self.seeds + [torch.ones_like(loss) for loss in losses])


class Weights:
    """The weights of one batch.

    Args:
        rows: rows of the whole batch, where they are known beforehand.
        num_pieces: the number of pieces, where it is known beforehand; a single one's counts are the batch's.
        counts: each term's count over the whole batch, where `counts=` gave them.
        loss_scale: what every seed is multiplied by besides, a scalar tensor.
        small_range: gradients pass through float16, where sums overflow that means would not.
        divided_last: what several processes compute meets before it is divided, so that none may have a scale of its
            own, nor a second buffer.
    """

    def __init__(
        self,
        rows: int | None,
        num_pieces: int | None,
        counts: dict[str, Count] | None,
        *,
        loss_scale: Tensor | None,
        small_range: bool,
        divided_last: bool = False,
    ) -> None:
        self._rows = rows
        self._num_pieces = num_pieces
        self._counts = counts
        self._loss_scale = loss_scale
        self._small_range = small_range and not divided_last
        self._divided_last = divided_last
        self._started = False
        self._known_scales: dict[str, Number | Tensor] = {}
        self._learned: str | None = None
        self._learned_scale: Number | Tensor = 1
        self._scale_is_chosen: bool | Tensor = False
        self._constants: dict[tuple[Number, torch.dtype, torch.device], Tensor] = {}

    def passes(self, reading: Reading) -> tuple[Pass, Pass]:
        """The backward of a piece, and another for the terms that `factor` must not touch."""
        if not self._started:
            self._start(reading.terms)
        if self._small_range and self._learned is not None:
            self._choose_scale(reading.terms[self._learned].count)
        main, aside = Pass([], []), Pass([], [])
        for name, term in reading.terms.items():
            if term.value.requires_grad and not is_zero(term.count):
                scale = self._known_scales.get(name)
                one_of = main if scale is None or self._learned is None else aside
                scale = self._learned_scale if scale is None else scale
                one_of.values.append(term.value)
                one_of.seeds.append(self._seed(term, scale))
        if not main.values and not aside.values and any(is_positive(term.count) for term in reading.terms.values()):
            raise LossError(
                "the loss has no graph: nothing in it depends on a tensor that requires grad"
                + ("" if torch.is_grad_enabled() else " (gradients are switched off by torch.no_grad)")
            )
        return main, aside

    def factor(self, totals: Totals) -> Number | Tensor:
        """What the sums of the main pass have to be multiplied by, once."""
        if not self._started:  # no piece in this process, but the sums of others
            self._learned = next((name for name, total in totals.terms.items() if self._is_unknown(total.per)), None)
        if self._learned is None:
            return 1
        return reciprocal(totals.terms[self._learned].count) / self._learned_scale

    def _start(self, terms: dict[str, Term]) -> None:
        """Learn from the first piece which denominator is unknown, and choose what its sums are scaled by."""
        self._started = True
        own = [name for name, term in terms.items() if term.per is Per.OWN_COUNT]
        countable = {name for name, term in terms.items() if term.per is not Per.NOTHING}
        if self._counts is not None and not set(own) <= self._counts.keys() <= countable:
            raise CountError(
                f"counts= names {_listed(self._counts)}, but the terms of the loss that have a count of their own are "
                f"{_listed(own)}"
            )
        denominators = {name: self._known_denominator(name, term) for name, term in terms.items()}
        self._known_scales = {name: reciprocal(one) for name, one in denominators.items() if one is not None}
        unknown = [name for name in terms if name not in self._known_scales]
        own = [name for name in own if name in unknown]
        in_two_buffers = self._divided_last and own and len(terms) > 1
        if len(own) > 1 or (own and len(own) < len(unknown)) or in_two_buffers:
            raise CountError(
                f"terms {_listed(unknown)} are divided by different counts, which must be known before "
                "the first backward: give counts= to .backward or .step, a function of a piece that returns each "
                f"term's count, such as lambda piece: {{{', '.join(f'{name!r}: ...' for name in own)}}}"
            )
        if unknown:
            self._learned = unknown[0]  # terms divided by the rows share their denominator
            if self._small_range or (terms[self._learned].value.dtype == torch.float16 and not self._divided_last):
                self._learned_scale = _power_of_two_over(terms[self._learned].count) * _power_of_two_over(
                    self._num_pieces or 1
                )

    def _choose_scale(self, count: Count) -> None:
        """Scale sums by what the first piece that counts something suggests; those before it have added nothing."""
        if self._scale_is_chosen is True:
            return
        expected = count * (self._num_pieces or 1)
        suggested = _power_of_two_over(expected)
        if not isinstance(count, Tensor):
            if count:
                chosen = self._scale_is_chosen
                self._learned_scale = (
                    suggested if chosen is False else torch.where(chosen, self._learned_scale, suggested)
                )
                self._scale_is_chosen = True
        elif self._scale_is_chosen is False:
            self._learned_scale, self._scale_is_chosen = suggested, count > 0
        else:
            self._learned_scale = torch.where(self._scale_is_chosen, self._learned_scale, suggested)
            self._scale_is_chosen = self._scale_is_chosen | (count > 0)

    def _is_unknown(self, per: Per) -> bool:
        """Whether such a denominator has to be learned from the pieces."""
        if per is Per.OWN_COUNT:
            return self._counts is None and self._num_pieces != 1
        return per is Per.ROWS and self._rows is None

    def _known_denominator(self, name: str, term: Term) -> Count | None:
        if self._is_unknown(term.per):
            return None
        if term.per is Per.OWN_COUNT:
            return term.count if self._counts is None else self._counts[name]
        return self._rows if term.per is Per.ROWS else 1

    def _seed(self, term: Term, scale: Number | Tensor) -> Tensor:
        """d objective / d value = weight · scale, and 0 for a piece that counts nothing; rounded to 16 bits last."""
        value, share = term.value, term.weight * scale
        if not isinstance(share, Tensor) and not isinstance(term.count, Tensor) and self._loss_scale is None:
            return self._constant(share, value, value.dtype)
        wide = torch.promote_types(value.dtype, torch.float32)
        seed = share.to(value.device) if isinstance(share, Tensor) else self._constant(share, value, wide)
        if self._loss_scale is not None:
            seed = seed * self._loss_scale
        if isinstance(term.count, Tensor):
            seed = torch.where(term.count.to(value.device) == 0, 0, seed)
        return seed.to(value.dtype)

    def _constant(self, share: Number, value: Tensor, dtype: torch.dtype) -> Tensor:
        key = (share, dtype, value.device)
        if key not in self._constants:
            self._constants[key] = torch.full((), share, dtype=dtype, device=value.device)
        return self._constants[key]


def nothing(reading: Reading) -> Pass:
    """The backward of a piece that shall add nothing."""
    values = [term.value for term in reading.terms.values() if term.value.requires_grad]
    return Pass(values, [torch.zeros_like(value) for value in values])


def _power_of_two_over(count: Count) -> Number | Tensor:
    """1 over the next power of two above `count`, exactly: a mantissa over its number is one."""
    if isinstance(count, Tensor):
        wide = count.to(torch.float32)
        return torch.where(wide > 0, torch.frexp(wide).mantissa / wide, 1.0)
    return math.frexp(count)[0] / count if count else 1.0


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
