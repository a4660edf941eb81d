"""What a person sees while a run goes on: a live display on a terminal, plain lines elsewhere."""

import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .._budget import in_units
from .metrics import Record
from .summary import clock

Lines = Sequence[tuple[str, str]]

OFTEN = 0.1  # seconds between two pictures: the eye does not see more, and the run shall not wait


class Screen:
    """Shows nothing: for ranks that are not the first, and for tests."""

    def say(self, lines: Lines) -> None:
        """Facts with their names."""

    def note(self, message: str) -> None:
        """Something that takes a moment is about to begin."""

    def warn(self, message: str) -> None:
        """Something that a person should know, though the run goes on."""

    def start(self, lines: Lines, steps: int, done: int) -> None:
        """The run begins, or goes on after some steps."""

    def step(self, record: Record) -> None:
        """A step is done."""

    def stop(self) -> None:
        """No more steps; may be called again."""

    @staticmethod
    def of(stream: TextIO) -> "Screen":
        """The one that suits where it is shown."""
        return Picture(stream) if stream.isatty() else Plain(stream)


class Plain(Screen):
    """A line now and then, for files and pipes.

    Args:
        stream: where they go.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._pace: Pace | None = None

    def say(self, lines: Lines) -> None:
        for name, text in lines:
            print(f"{name:<11} {text}", file=self._stream)
        print(file=self._stream, flush=True)

    def note(self, message: str) -> None:
        print(message, file=self._stream, flush=True)

    def warn(self, message: str) -> None:
        print(f"wholebatch: {message}", file=sys.stderr)

    def start(self, lines: Lines, steps: int, done: int) -> None:
        self.say(lines)
        self._pace = Pace(steps, done)

    def step(self, record: Record) -> None:
        assert self._pace is not None
        left = self._pace.left(record)
        step, steps = record["step"], self._pace.steps
        if step == 1 or step == steps or step % max(1, steps // 20) == 0 or "validation_loss" in record:
            parts = [f"step {step:{len(str(steps))}}/{steps}", *learning(record), *costs(record), f"{clock(left)} left"]
            print("   ".join(parts), file=self._stream, flush=True)

    def stop(self) -> None:
        if self._pace:
            print(file=self._stream, flush=True)
        self._pace = None


class Picture(Screen):
    """A bar and the figures of the last step, in place.

    Args:
        stream: the terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._live: Live | None = None
        self._pace: Pace | None = None
        self._shown = 0.0
        self._validation: float | None = None

    def say(self, lines: Lines) -> None:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, text in lines:
            table.add_row(name, Text(text))
        self._console.print(table)
        self._console.print()

    def note(self, message: str) -> None:
        self._console.print(Text(message, style="dim"))

    def warn(self, message: str) -> None:
        self._console.print(Text(f"wholebatch: {message}", style="yellow"))

    def start(self, lines: Lines, steps: int, done: int) -> None:
        self.say(lines)
        self._pace = Pace(steps, done)
        self._live = Live(console=self._console, auto_refresh=False)
        self._live.start()

    def step(self, record: Record) -> None:
        assert self._pace is not None
        assert self._live is not None
        self._validation = record.get("validation_loss", self._validation)
        left = self._pace.left(record)
        if time.monotonic() - self._shown >= OFTEN or record["step"] == self._pace.steps:
            self._shown = time.monotonic()
            self._live.update(self._picture(record, left), refresh=True)

    def stop(self) -> None:
        if self._live:
            self._live.stop()
            self._console.print()
        self._live = None

    def _picture(self, record: Record, left: float) -> Table:
        assert self._pace is not None
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            ProgressBar(total=self._pace.steps, completed=record["step"], width=30),
            f"step {record['step']}/{self._pace.steps}",
            f"{clock(left)} left",
        )
        picture = Table.grid()
        picture.add_row(bar)
        shown = {**record, "validation_loss": self._validation}
        for figures in (learning(shown), costs(shown)):
            picture.add_row(Text("   ".join(figures), style="dim"))
        return picture


class Pace:
    """How long the rest will take, by the last few steps.

    Args:
        steps: of the run.
        done: before it went on.
    """

    def __init__(self, steps: int, done: int) -> None:
        self.steps = steps
        self._times = deque([(done, time.monotonic())], maxlen=20)

    def left(self, record: Record) -> float:
        """Seconds, after this step."""
        self._times.append((record["step"], time.monotonic()))
        (first, start), (last, now) = self._times[0], self._times[-1]
        return (now - start) / max(1, last - first) * (self.steps - last)


def learning(record: Record) -> list[str]:
    """How well it goes, as people read it."""
    validation = record.get("validation_loss")
    return [
        f"loss {_number(record['loss'], '.3f')}",
        *([f"validation {validation:.3f}"] if validation is not None else []),
        f"gradient norm {_number(record['grad_norm'], '.2f')}",
    ]


def costs(record: Record) -> list[str]:
    """What it takes, as people read it."""
    peak = record["peak_memory"]
    return [
        f"{record['tokens_per_second']:,.0f} tokens/s",
        f"{record['micro_batch_size']} rows at a time",
        *([f"peak {in_units(peak)}"] if peak is not None else []),
    ]


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)
