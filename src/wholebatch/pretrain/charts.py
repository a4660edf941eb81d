"""Line charts as SVG, drawn by hand: nothing to load, and colours that follow the page."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

Point = tuple[float, float]

WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 38
MOST_DOTS = 60


@dataclass(frozen=True)
class Line:
    """A series.

    Args:
        name: what it shows.
        points: in order of x.
        mark: how single points are seen: as a "dot" or a "ring", or only under the pointer.
    """

    name: str
    points: Sequence[Point]
    mark: Literal["dot", "ring", "touch"] = "touch"


@dataclass(frozen=True)
class Chart:
    """A chart of lines over a common x axis.

    Args:
        lines: what is drawn, first in front.
        x: what the x axis says.
        label: how a value is written.
        from_zero: whether the y axis begins at 0.
        level: a dashed line across, with its name.
    """

    lines: Sequence[Line]
    x: str
    label: Callable[[float], str]
    from_zero: bool = False
    level: tuple[str, float] | None = None

    def svg(self, title: str) -> str:
        """The picture.

        Args:
            title: what readers of the page's text are told that it shows.
        """
        xs = [x for line in self.lines for x, _ in line.points]
        ys = [y for line in self.lines for _, y in line.points] + ([self.level[1]] if self.level else [])
        low, high = (0.0 if self.from_zero else min(ys)), max(ys)
        marks = ticks(low, high, 5)
        low, high = min(low, marks[0]), max(high, marks[-1])
        left, right = min(xs), max(xs)

        def place(point: Point) -> Point:
            across = (point[0] - left) / (right - left or 1)
            up = (point[1] - low) / (high - low or 1)
            return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

        drawn = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
            *(self._mark_y(place((left, mark))[1], self.label(mark)) for mark in marks),
            *(_mark_x(*place((mark, low)), f"{mark:,.0f}") for mark in ticks(left, right, 5) if left <= mark <= right),
            f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle">'
            f"{escape(self.x)}</text>",
        ]
        if self.level:
            drawn.append(_level(place((left, self.level[1]))[1], self.level[0]))
        for number, line in reversed(list(enumerate(self.lines))):
            drawn += self._draw(line, number, place)
        return "\n".join([*drawn, "</svg>"])

    def legend(self) -> str:
        """The lines' names beside their colours; nothing where there is one line."""
        if len(self.lines) < 2:
            return ""
        names = (f'<span class="key s{i}">{escape(line.name)}</span>' for i, line in enumerate(self.lines))
        return f'<p class="legend">{"".join(names)}</p>'

    def _draw(self, line: Line, number: int, place: Callable[[Point], Point]) -> list[str]:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, line.points))
        drawn = [f'<polyline class="line s{number}" points="{path}"/>']
        every = max(1, len(line.points) // MOST_DOTS)
        for point in line.points[::every]:
            x, y = place(point)
            told = escape(f"{self.x} {point[0]:,.0f}: {line.name} {self.label(point[1])}")
            drawn.append(
                f'<circle class="{line.mark} s{number}" cx="{x:.1f}" cy="{y:.1f}"><title>{told}</title></circle>'
            )
        return drawn

    def _mark_y(self, y: float, text: str) -> str:
        return (
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="axis" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>'
        )


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from just within `low` to just within `high`, or beyond if there would be one only.

    >>> ticks(0, 130, 5)
    [0.0, 20.0, 40.0, 60.0, 80.0, 100.0, 120.0]
    """
    if not high > low:
        low, high = low - abs(low) / 10 - 1e-9, high + abs(high) / 10 + 1e-9
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((factor * power for factor in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / rough)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    if last - first < 1:
        first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, last + 1)]


def _mark_x(x: float, y: float, text: str) -> str:
    return f'<text class="axis" x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{escape(text)}</text>'


def _level(y: float, text: str) -> str:
    return (
        f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="axis level-name" x="{WIDTH - RIGHT}" y="{y - 5:.1f}" text-anchor="end">{escape(text)}</text>'
    )
