"""What a case is: a problem, the settings that it is measured at, who takes part and what it must show."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

OURS = "wholebatch"
UNSPLIT = "unsplit batch"

MULTI_STEPS, MULTI_STEPS_DONATED = "optax.MultiSteps", "MultiSteps, donated"

PEERS = {
    "Accelerate": "accelerate",
    "Fabric": "lightning",
    "optax.microbatch": "optax",
    MULTI_STEPS: "optax",
    MULTI_STEPS_DONATED: "optax",
}
"""The package that a contender needs besides the front end."""

SAME = 1e-6
"""How far weights may be apart after one step in float64, over their largest change: some round a factor to float32."""

Measure = Literal["time", "time per row", "peak memory", "temporary memory", "overhead"]


@dataclass(frozen=True)
class Setting:
    """One run of contenders against each other.

    Args:
        name: as it is called within its case.
        micro_batch_size: rows of a piece.
        options: of the problem.
        rounds: how often each has its turn.
        repeats: steps in a turn.
        peaks: whether peak memory is measured.
    """

    name: str
    micro_batch_size: int
    options: Mapping[str, int] = field(default_factory=dict)
    rounds: int = 7
    repeats: int = 1
    peaks: bool = False


@dataclass(frozen=True)
class Target:
    """What a case must show: a measure of ours over another's is at most this.

    Args:
        measure: what is compared; "overhead" is microseconds per piece beyond the other's.
        settings: at which settings.
        over: the other contender, or the other setting of ours.
        at_most: the limit.
    """

    measure: Measure
    settings: tuple[str, ...]
    over: str
    at_most: float


@dataclass(frozen=True)
class Case:
    """A table's worth of measurements.

    Args:
        title: what is trained.
        front_end: "torch" or "jax".
        problem: its name there.
        contenders: who takes part; the first is what others are compared with.
        settings: where they are compared.
        checked: options of the problem, where contenders are checked before timing: large weights stay large, as they
            are summed in other ways than small ones.
        quick: options of the problem, in a run that only tries whether all works.
        targets: what it must show.
    """

    title: str
    front_end: Literal["torch", "jax"]
    problem: str
    contenders: tuple[str, ...]
    settings: tuple[Setting, ...]
    checked: Mapping[str, int]
    quick: Mapping[str, int]
    targets: tuple[Target, ...] = ()
