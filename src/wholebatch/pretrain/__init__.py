"""What `wholebatch train` runs: a language model, from data to report, on top of the public library.

text → tokens → the rows of step n → Accumulator.step → metrics, checkpoints → report
"""

from .display import Screen
from .run import Ended, Request, run
from .settings import Settings

__all__ = ["Ended", "Request", "Screen", "Settings", "run"]
