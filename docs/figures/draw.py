"""Draw the figures of docs/ideas, each from what its page computes.

python docs/figures/draw.py [PAGE ...]        such as clipping; all of them without
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import pages
import torch
from matplotlib import pyplot

FOLDER = Path(__file__).parent
BLUE, ORANGE, GREEN, GREY = "#2563a8", "#d9722c", "#3f8f5b", "#9aa3ad"

Figure = Any
Names = Mapping[str, Any]

STYLE = {
    "axes.edgecolor": GREY,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "figure.facecolor": "white",
    "font.size": 10,
    "legend.frameon": False,
    "savefig.facecolor": "white",
    "svg.hashsalt": "wholebatch",  # the same file for the same picture
}


def memory_and_time(names: Names) -> Figure:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    sizes, memory = names["SIZES"], names["memory"]
    below = [0.0] * len(sizes)
    colours = {"parameters": BLUE, "gradients": "#6f9fd0", "optimizer's state": "#b9d0e8", "activations": ORANGE}
    for what, colour in colours.items():
        kib = [memory[size][what] / 1024 for size in sizes]
        left.bar(range(len(sizes)), kib, bottom=below, label=what, color=colour, width=0.7)
        below = [one + other for one, other in zip(below, kib, strict=True)]
    left.set_xticks(range(len(sizes)), sizes)
    left.set(title="Memory of a step, KiB", xlabel=f"rows in a micro-batch (of {names['ROWS']})")
    left.legend(loc="upper left", reverse=True)
    for what, found, colour in (
        ("operations launched", names["launches"], ORANGE),
        ("arithmetic", names["arithmetic"], BLUE),
    ):
        right.plot(sizes, [found[size] / found[sizes[-1]] for size in sizes], "o-", label=what, color=colour)
    right.set(title="Over the unsplit batch", xlabel="rows in a micro-batch", xscale="log", yscale="log")
    right.set_xticks(sizes, sizes)
    right.set_yticks([1, 10, 100], ["1x", "10x", "100x"])
    right.minorticks_off()
    right.legend()
    return figure


def learning_rate(names: Names) -> Figure:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    sizes = names["batch_sizes"]
    for rule, colour in (("linear", BLUE), ("sqrt", ORANGE)):
        left.plot(sizes, names["rates"][rule], "o-", label={"sqrt": "square root"}.get(rule, rule), color=colour)
    left.set(title="Learning rate", xlabel="rows in the batch", xscale="log", yscale="log")
    left.set_xticks(sizes, sizes)
    left.set_yticks([1e-3, 1e-2], ["0.001", "0.01"])
    left.minorticks_off()
    left.legend()
    factors = names["factors"]
    for (name, length), colour, mark in zip(
        names["lengths"].items(), (BLUE, ORANGE, GREEN), ("o-", "o-", "s--"), strict=True
    ):
        right.plot(factors, length, mark, label=name, color=colour)
    right.set(title="Length of one step", xlabel="factor of the loss", xscale="log", yscale="log")
    right.set_xticks(factors, [f"{factor}x" for factor in factors])
    right.set_yticks(factors, [f"{factor}x" for factor in factors])
    right.minorticks_off()
    right.legend()
    return figure


def clipping(names: Names) -> Figure:
    figure, axes = pyplot.subplots(figsize=(6.5, 4), layout="constrained")

    def arrow(vector: Any, colour: str, label: str | None, width: float) -> None:
        x, y = vector.tolist()
        axes.quiver(0, 0, x, y, angles="xy", scale_units="xy", scale=1, color=colour, label=label, width=width)

    for k, part in enumerate(names["parts"]):
        arrow(part, GREY, "what each row adds" if k == 0 else None, 0.005)
    arrow(names["whole"], "#b9d0e8", "the whole gradient", 0.009)
    arrow(names["right"], BLUE, "clipped as a whole", 0.012)
    arrow(names["per_piece"], ORANGE, "clipped by micro-batch, added up", 0.012)
    axes.set(xlim=(-0.3, 0.8), ylim=(-0.15, 1.4), title="Gradients", xlabel="first weight", ylabel="second weight")
    axes.set_aspect("equal")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def several_processes(names: Names) -> Figure:
    figure, axes = pyplot.subplots(figsize=(5.5, 3.4), layout="constrained")
    numbers = names["numbers"]
    for found, label, colour in (
        (names["per_micro_batch"], "after every micro-batch", ORANGE),
        (names["per_batch"], "once per batch", BLUE),
    ):
        axes.plot(numbers, [found[n] / names["size"] for n in numbers], "o-", label=label, color=colour)
    axes.set(title="Gradients sent, in sizes of the model", xlabel="micro-batches in a batch", ylim=(0, None))
    axes.set_xticks(numbers)
    axes.legend()
    return figure


def batch_norm(names: Names) -> Figure:
    figure, axes = pyplot.subplots(figsize=(7, 3.4), layout="constrained")
    errors, micro, processes = names["errors"], names["MICRO"], names["PROCESSES"]
    whose = {micro: "BatchNorm", processes * micro: "SyncBatchNorm", names["ROWS"]: "the batch"}
    axes.bar(range(len(errors)), errors.values(), color=[BLUE if rows in whose else "#b9d0e8" for rows in errors])
    axes.set_xticks(range(len(errors)), [f"{rows}\n{whose.get(rows, '')}" for rows in errors])
    axes.set(title="Distance from the batch's gradient", xlabel="rows normalised together")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    return figure


FIGURES: dict[str, Callable[[Names], Figure]] = {
    "memory-and-time": memory_and_time,
    "learning-rate": learning_rate,
    "clipping": clipping,
    "several-processes": several_processes,
    "batch-norm": batch_norm,
}
"""By page of docs/ideas, and by name of the file."""


def draw(name: str, computed: Names, folder: Path) -> Path:
    """Draw a page's figure from the names that its examples leave."""
    with pyplot.rc_context(STYLE):
        figure = FIGURES[name](computed)
        path = folder / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
    return path


def main(names: list[str]) -> None:
    for name in names or FIGURES:
        torch.manual_seed(0)
        path = draw(name, pages.run(FOLDER.parent / "ideas" / f"{name}.md"), FOLDER)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
