"""The first steps three ways, from the same weights and batches: by the library, unsplit, and by the textbook loop.

textbook: Σ_k ∇(mean of piece k) / K, which is the whole batch's gradient only where pieces are equal
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .backend import Backend, load
from .corpus import Corpus
from .loop import rows_of_step
from .ranks import Ranks
from .sampling import Rows
from .schedule import learning_rate
from .settings import Settings

TIMED, WARM_UP = 5, 2
JUDGED = 4
NOTE = (
    "From the same weights, on the same batches, taking turns. Time is the median step's. Weights are compared with "
    f"the unsplit batch's after {JUDGED} steps in float64, where rounding does not hide what else is different. The "
    "textbook loop averages the means of its pieces, as most training scripts do."
)

UNSPLIT = "the unsplit batch"

Step = Callable[[Backend, Rows, int, float], Any]


def compare(settings: Settings, corpus: Corpus, micro_batch_size: int) -> dict[str, Any]:
    """What the report says about the three ways; None where memory ran out, which it may do for the unsplit batch.

    Args:
        settings: of the run; without dropout here, which draws other numbers for other pieces.
        corpus: where rows come from.
        micro_batch_size: the rows in memory at a time, where the batch is cut.
    """
    settings = dataclasses.replace(settings, dropout=0.0, micro_batch_size=micro_batch_size)
    ways = _ways(micro_batch_size)
    steps = min(settings.steps, TIMED + WARM_UP)
    timed, backends = _train(settings, corpus, ways, steps)
    wide = dataclasses.replace(settings, precision="fp64")
    _, judged = _train(wide, corpus, ways, min(settings.steps, JUDGED))
    return {
        "steps": steps,
        "note": NOTE,
        "ways": [
            {
                "name": name,
                "seconds_per_step": _typical(timed[name]) if name in backends else None,
                "peak_memory": backends[name].peak_memory() if name in backends else None,
                "difference": _largest_difference(judged, name, UNSPLIT),
            }
            for name in ways
        ],
    }


def _ways(micro_batch_size: int) -> dict[str, Step]:
    def textbook(backend: Backend, rows: Rows, step: int, rate: float) -> None:
        sizes = range(micro_batch_size, len(rows), micro_batch_size)
        backend.plain_step(np.split(rows, sizes), step, rate)

    return {
        "wholebatch": lambda backend, rows, step, rate: backend.step(rows, step, rate),
        UNSPLIT: lambda backend, rows, step, rate: backend.plain_step([rows], step, rate),
        "the textbook loop": textbook,
    }


def _train(
    settings: Settings, corpus: Corpus, ways: dict[str, Step], steps: int
) -> tuple[dict[str, list[float]], dict[str, Backend]]:
    """The seconds of each step, and the models afterwards; without those that did not fit."""
    backends = {name: load(settings, corpus.tokenizer.size, Ranks.alone()) for name in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(1, steps + 1):
        rows, rate = rows_of_step(settings, corpus, step), learning_rate(settings, step)
        for name, backend in list(backends.items()):
            start = time.perf_counter()
            try:
                ways[name](backend, rows, step, rate)
            except Exception as error:
                if not backend.ran_out(error):
                    raise
                del backends[name]
            seconds[name].append(time.perf_counter() - start)
    return seconds, backends


def _typical(seconds: list[float]) -> float:
    return statistics.median(seconds[WARM_UP:] or seconds)


def _largest_difference(backends: dict[str, Backend], name: str, other: str) -> float | None:
    """Between weights; None where there is nothing to compare."""
    if not {name, other} <= backends.keys():
        return None
    ours, theirs = backends[name].state().weights, backends[other].state().weights
    return max(float(np.abs(ours[weight] - theirs[weight]).max()) for weight in ours)
