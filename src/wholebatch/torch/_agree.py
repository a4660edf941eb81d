"""Agree: what every process contributed, learned by all of them in small exchanges.

    T = Σ_ranks T_rank,   C = Σ_ranks C_rank

Before the first piece they tell their rows and counts, which are denominators; after the last one their totals. A
process that failed says so instead, and all of them raise. One process has nobody to ask: its totals are the batch's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import and_

import torch

from .._errors import BatchError, RankError
from ._ledger import Ledger
from ._loss import Count
from ._messages import added, on_host, sum_if_known, summed_calls, summed_counts, told
from ._peers import Alone, Message, is_lost, lost
from ._sums import GradientSums
from ._totals import Totals

_ON_THE_HOST = ("can't allocate memory", "not enough memory", "bad_alloc", "could not create a", "could not execute a")
"""How allocators on the host say that they failed; the last two are oneDNN's words, which does not tell why."""

WORDS = 1000
"""Characters of an error that are told to the other processes."""


@dataclass(frozen=True, slots=True)
class Share:
    """How much of a batch there is, in one process or in all of them; None where it is not known beforehand.

    Args:
        rows: how many.
        pieces: how many.
        counts: each term's, where `counts=` gave them.
        turns: how many pieces each process has to run; None where it is as many as it has.
    """

    rows: int | None = None
    pieces: int | None = None
    counts: dict[str, Count] | None = None
    turns: int | None = None


@dataclass(frozen=True, slots=True)
class Whole:
    """What the pieces of all processes came to.

    Args:
        totals: theirs, added up.
        rows: None where they cannot be told.
        untouched: positions of the shared parameters that no process has reached.
        nonfinite: what one of them found that is infinite or not a number, in words.
        calls: how many values each call of a module with statistics of the batch saw.
    """

    totals: Totals
    rows: int | None
    untouched: list[int]
    nonfinite: str | None
    calls: list[list[int]]


class Agreement:
    """The exchanges of one batch.

    Args:
        processes: who takes part.
    """

    divisible = True
    """Whether this process's pieces could be smaller."""

    def __init__(self, processes: Alone) -> None:
        self._processes = processes
        self._over = not processes.shared

    @contextmanager
    def together(self) -> Iterator[None]:
        """What fails within, fails in every process: the others learn of it where they would have agreed."""
        try:
            yield
        except BaseException as error:
            if self._over:
                if self._processes.shared and is_lost(error):  # while gradients were sent
                    self._processes.reset()
                    raise lost(error) from error
                raise
            self._over = True
            failures = _failures(self._processes.told_failures())
            if self._processes.in_step and not failures and is_lost(error):
                raise lost(error) from error
            failures = failures or _failures(self._processes.tell_failure(self._told_failure(error)))
            self._processes.reset()
            if isinstance(error, Exception):
                raise _rank_error(failures) from error
            raise

    def _told_failure(self, error: BaseException) -> Message:
        words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return {"failure": words[:WORDS], "memory": self.divisible and is_out_of_memory(error)}

    def before(self, share: Share) -> Share:
        """The whole batch's share; afterwards the processes are ready for its first piece."""
        if self._over:
            self._processes.begin(self._processes.clean)
            return share
        names = list(share.counts or {})
        counts = on_host([] if share.counts is None else list(share.counts.values()))
        every = self._exchange(
            {
                "rows": share.rows,
                "pieces": share.pieces,
                "counts": dict(zip(names, counts, strict=True)),
                "clean": self._processes.clean,
            }
        )
        each = [message["pieces"] for message in every]
        if not any(each):
            self._over = True
            raise BatchError(f"the batch is empty: it has 0 rows in each of {len(every)} processes")
        try:
            turns = self._processes.turns(each)
        except BatchError:  # in every process
            self._over = True
            raise
        self._processes.begin(all(message["clean"] for message in every))
        whole_counts = None if share.counts is None else summed_counts([message["counts"] for message in every])
        return Share(sum_if_known([message["rows"] for message in every]), sum(each), whole_counts, turns)

    def between(self) -> None:
        """All is well so far; asked where nobody can be asked from here on, until the last backward is over."""
        if self._processes.overlaps and not self._over:
            self._exchange({})
            self._processes.in_step = True

    def after(
        self,
        ledger: Ledger,
        sums: GradientSums,
        judge: Callable[[Totals], str | None],
        calls: list[list[int]],
    ) -> Whole:
        """What the pieces of all processes came to.

        Args:
            ledger: what this process's came to.
            sums: their gradients.
            judge: looks at the totals of this process; raises, or says what is not finite.
            calls: how many values its modules saw that have statistics of the batch, call by call.
        """
        totals = ledger.totals()
        if self._over:
            return Whole(totals, ledger.rows, self._processes.untouched(sums), None, calls)
        nonfinite = judge(totals)
        untouched = sum(1 << i for i in self._processes.untouched(sums))
        every = self._exchange(
            {
                "pieces": ledger.pieces,
                "rows": ledger.rows,
                "terms": told(totals.terms),
                "metrics": told(totals.metrics),
                "nonfinite": nonfinite,
                "untouched": f"{untouched:x}" if ledger.pieces else "",
                "calls": calls,
            }
        )
        self._over = True
        having_pieces = [message for message in every if message["pieces"]]
        if not having_pieces:
            raise BatchError("nothing was added in any process: call .add(loss) for each piece before .finish()")
        untouched = reduce(and_, (int(message["untouched"], 16) for message in having_pieces))
        return Whole(
            Totals(
                added([message["terms"] for message in having_pieces], self._processes.device),
                added([message["metrics"] for message in having_pieces], self._processes.device),
            ),
            sum_if_known([message["rows"] for message in every]),
            [i for i in range(untouched.bit_length()) if untouched >> i & 1],
            next((f"{m['nonfinite']} on rank {rank}" for rank, m in enumerate(every) if m.get("nonfinite")), None),
            summed_calls([message["calls"] for message in every]),
        )

    def _exchange(self, message: Message) -> list[Message]:
        try:
            every = self._processes.gather(message)
            failures = _failures(every)
            if failures:
                self._processes.reset()
                raise _rank_error(failures)
        except BaseException:
            self._over = True
            raise
        return every


def is_out_of_memory(error: BaseException) -> bool:
    """Whether smaller pieces might help."""
    if isinstance(error, RankError):
        return error.out_of_memory
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _ON_THE_HOST)


def _failures(every: list[Message]) -> dict[int, Message]:
    return {rank: message for rank, message in enumerate(every) if "failure" in message}


def _rank_error(failures: dict[int, Message]) -> RankError:
    first, *others = failures
    besides = f" (and {len(others)} more: {', '.join(map(str, others))})" if others else ""
    return RankError(
        f"rank {first}{besides} failed in a batch that it shares: {failures[first]['failure']}; no process has changed "
        "its gradients",
        rank=first,
        out_of_memory=all(failure["memory"] for failure in failures.values()),
    )
