"""Contenders take turns.

    ratio = best time of a contender / best time of the baseline

Who starts a round moves on by one each time, and batches are in rotation.
"""

import time
from typing import Any

import numpy as np

WARM_UP = 1
BATCHES = 4


def differences(bench: Any, names: list[str], reference: str) -> dict[str, float]:
    """How far off each contender's weights are after one step, over the largest change of any."""
    (batch,) = bench.batches(1)

    def after(name: str) -> tuple[list[Any], list[Any]]:
        contender = bench.contender(name)
        before = contender.weights()
        contender.step(batch)
        return before, contender.weights()

    before, meant = after(reference)
    change = _largest(meant, before)
    return {name: _largest(after(name)[1], meant) / change for name in names}


def _largest(some: list[Any], others: list[Any]) -> float:
    return max(float(np.abs(one - other).max()) for one, other in zip(some, others, strict=True))


def take_turns(bench: Any, names: list[str], rounds: int, repeats: int) -> dict[str, dict[str, Any]]:
    """What each contender took, by name; the first is the baseline.

    Args:
        bench: makes contenders and batches.
        names: of the contenders.
        rounds: how often each has its turn.
        repeats: steps in a turn.
    """
    batches = bench.batches(BATCHES)
    contenders = {name: bench.contender(name) for name in names}
    for contender in contenders.values():
        for i in range(WARM_UP):
            contender.step(batches[i])
    seconds = np.empty((len(names), rounds))
    for i in range(rounds):
        for j in range(len(names)):
            k = (i + j) % len(names)
            seconds[k, i] = _timed(contenders[names[k]], batches[i % BATCHES], repeats)
    facts = {name: contender.facts for name, contender in contenders.items()}
    return {name: {**summary(seconds[k], seconds[0]), **facts[name]} for k, name in enumerate(names)}


def _timed(contender: Any, batch: Any, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        contender.step(batch)
    return (time.perf_counter() - start) / repeats


def summary(seconds: Any, baseline: Any) -> dict[str, Any]:
    """The best time and its ratio to the baseline's, with the quartiles of the ratios within rounds."""
    low, high = np.quantile(seconds / baseline, (0.25, 0.75))
    return {
        "seconds": float(np.min(seconds)),
        "ratio": float(np.min(seconds) / np.min(baseline)),
        "ratio_quartiles": [float(low), float(high)],
        "all_seconds": [round(float(time), 6) for time in seconds],
    }
