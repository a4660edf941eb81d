"""What a run is and what came of it, in facts and in a few lines."""

from typing import Any

from .._budget import in_units
from .folder import Folder
from .metrics import read

Facts = dict[str, Any]


def beginning(facts: Facts, done: int) -> list[tuple[str, str]]:
    """What is about to be done, for people."""
    settings = facts["settings"]
    size, rows = facts["micro_batch_size"], settings["batch_size"]
    layers, heads = _several(settings["layers"], "layer"), _several(settings["heads"], "head")
    lines = [
        ("text", f"{facts['text_name']}: {facts['text_tokens']:,} tokens ({facts['tokenizer_name']})"),
        (
            "model",
            f"GPT with {facts['parameters']:,} parameters: width {settings['width']}, {layers}, {heads}, "
            f"sequences of {settings['seq_len']}",
        ),
        (
            "batch",
            f"{rows} rows of {settings['seq_len']} tokens for each step, {size} in memory at a time{_ranks(facts)}",
        ),
    ]
    needed = facts["memory_by_rows"].get(str(size))
    if needed and settings["micro_batch_size"] is None:
        lines.append(
            (
                "memory",
                f"{size} rows are predicted to need {in_units(needed)}, where {in_units(settings['memory'])} are "
                f"allowed; all {rows} would need {in_units(_whole(facts))}",
            )
        )
    if done:
        lines.append(("resumed", f"after step {done} of {settings['steps']}"))
    return lines


def summarise(facts: Facts, folder: Folder, **found: Any) -> Facts:
    """What came of a run, from its metrics and from what was found at its end."""
    records = list(read(folder.metrics))
    seconds = sum(record["seconds"] for record in records)
    peaks = [record["peak_memory"] for record in records if record["peak_memory"] is not None]
    return {
        **{name: fact for name, fact in facts.items() if name not in ("backend", "format")},
        **found,
        "step": records[-1]["step"],
        "train_loss": records[-1]["loss"],
        "loss_after": records[-1]["validation_loss"],
        "seconds": round(seconds, 3),
        "tokens": records[-1]["tokens"],
        "tokens_per_second": round(len(records) * _tokens(facts) / seconds, 1),
        "peak_memory": max(peaks, default=None),
        "whole_batch_memory": _whole(facts),
        "checkpoint": f"checkpoints/step-{records[-1]['step']:06d}",
    }


def ending(summary: Facts, folder: Folder) -> list[tuple[str, str]]:
    """What was done, for people."""
    settings, size = summary["settings"], summary["micro_batch_size"]
    exactness = summary["exactness"]
    verdict = "the gradient of the unsplit batch" if exactness["exact"] else "NOT the gradient of the unsplit batch"
    peak, whole = summary["peak_memory"], summary["whole_batch_memory"]
    memory = "not known" if peak is None else f"{in_units(peak)} at the peak"
    if settings["micro_batch_size"] is None:
        memory += f", of {in_units(settings['memory'])} that were allowed"
    return [
        ("done", f"{summary['step']} steps, {summary['tokens']:,} tokens in {clock(summary['seconds'])}"
         f" ({summary['tokens_per_second']:,.0f} tokens/s)"),
        ("batch", f"{settings['batch_size']} rows, {size} in memory at a time{_ranks(summary)}"),
        ("memory", memory + f"; the whole batch would have needed {in_units(whole)}"),
        ("exactness", f"{verdict}, within {exactness['error']:.0e} of its largest entry ({exactness['dtype']})"),
        ("loss", f"{summary['loss_before']:.3f} before, {summary['loss_after']:.3f} after, on text that was held out"),
        *_compared(folder),
        ("checkpoint", str(folder.path / summary["checkpoint"])),
        ("metrics", str(folder.metrics)),
        ("report", str(folder.report)),
    ]  # fmt: skip


def figures(way: Facts) -> tuple[str, ...]:
    """A compared way's time, memory and difference, for people."""
    if way["seconds_per_step"] is None:
        return ("did not fit the memory",)
    off = way["difference"]
    return (
        f"{way['seconds_per_step']:.3g} s per step",
        in_units(way["peak_memory"]),
        "weights not compared" if off is None else f"weights off by {off:.0e}",
    )


def clock(seconds: float) -> str:
    """A duration as people say it.

    >>> clock(75), clock(4000)
    ('1 min 15 s', '1 h 6 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _compared(folder: Folder) -> list[tuple[str, str]]:
    """The three ways, if they were compared."""
    return [
        (
            "" if number else "compared",
            f"{way['name']:<18} {', '.join(figures(way))}",
        )
        for number, way in enumerate(folder.read_comparison().get("ways", []))
    ]


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _tokens(facts: Facts) -> int:
    """Of one step."""
    return int(facts["settings"]["batch_size"] * facts["settings"]["seq_len"])


def _whole(facts: Facts) -> int:
    """What the whole batch would need at once."""
    return int(max(facts["memory_by_rows"].values()))


def _ranks(facts: Facts) -> str:
    return f" in each of {facts['ranks']} processes" if facts["ranks"] > 1 else ""
