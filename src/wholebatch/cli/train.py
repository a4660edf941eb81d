"""`wholebatch train`: a language model, from data to report."""

import shlex
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from . import DONE, INTERRUPTED, Command, say

HELP = """Train a GPT with a batch that does not fit the memory, and say what came of it.

Without options: a minute or two on the source of Python's standard library, into runs/train."""


@click.command(
    "train",
    cls=Command,
    help=HELP,
    example="wholebatch train --data books/ --batch-size 256 --memory 2GiB --out runs/books",
)
@click.option("--data", multiple=True, metavar="PATH", help="Files or folders of text; may be repeated.")
@click.option("--field", metavar="NAME", help="Read them as JSON lines, and take this field of each.")
@click.option("--tokenizer", metavar="bpe|bytes|FILE", help="Trained on the text (bpe), bytes, or a tokenizer.json.")
@click.option("--vocab-size", type=int, help="The most tokens of a trained tokenizer.")
@click.option("--backend", type=click.Choice(["torch", "jax"]), help="The framework to train with (torch).")
@click.option(
    "--model",
    type=click.Choice(["tiny", "small", "base"]),
    help="What the model's and the other options are unless given (tiny).",
)
@click.option("--width", type=int, help="Of the model.")
@click.option("--layers", type=int, help="Its blocks.")
@click.option("--heads", type=int, help="Of its attention.")
@click.option("--seq-len", type=int, help="Tokens of a row.")
@click.option("--dropout", type=float, help="The probability of dropping an entry (0).")
@click.option("--batch-size", type=int, help="Rows of an optimizer step (64).")
@click.option("--micro-batch-size", metavar="auto|N", help="Rows in memory at a time; auto finds what fits (auto).")
@click.option("--memory", metavar="SIZE", help="The budget for that, such as 1GiB.")
@click.option("--lr", type=float, help="The learning rate, for --base-batch-size rows.")
@click.option("--lr-rule", type=click.Choice(["none", "linear", "sqrt"]), help="How it follows the batch size (none).")
@click.option("--base-batch-size", type=int, help="The rows that --lr was chosen for (64).")
@click.option("--warmup", type=int, metavar="STEPS", help="Until the learning rate is reached (a tenth).")
@click.option("--max-norm", type=float, help="Clip gradients to this norm (1).")
@click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16", "fp64"]), help="What is computed in (fp32).")
@click.option("--steps", type=int, help="Optimizer steps (160).")
@click.option("--tokens", type=int, help="Tokens to train on, in place of --steps.")
@click.option("--seed", type=int, help="Of weights, batches and dropout (0).")
@click.option("--validate-every", type=int, metavar="STEPS", help="Between validations (a tenth).")
@click.option("--checkpoint-every", type=int, metavar="STEPS", help="Between checkpoints (25).")
@click.option("--keep", type=int, metavar="K", help="How many checkpoints stay (2).")
@click.option("--out", type=Path, default=Path("runs/train"), show_default=True, help="The folder for its files.")
@click.option("--cache", type=Path, help="The folder for tokens, shared by all runs.")
@click.option("--resume", is_flag=True, help="Continue the run in --out, with its settings.")
@click.option("--overwrite", is_flag=True, help="Replace the run in --out.")
@click.option("--compare", is_flag=True, help="Also train the first steps unsplit, and with the textbook loop.")
@click.pass_context
def command(
    context: click.Context,
    /,
    out: Path,
    cache: Path | None,
    resume: bool,
    overwrite: bool,
    compare: bool,
    as_json: bool,
    **settings: Any,
) -> int:
    """Train, and say what came of it."""
    from ..pretrain.corpus import default_cache
    from ..pretrain.display import Screen
    from ..pretrain.folder import Folder
    from ..pretrain.run import Request, run
    from ..pretrain.summary import ending

    if resume and overwrite:
        raise click.UsageError("both --resume and --overwrite were given: one continues a run, the other removes it")
    given = {name: value for name, value in settings.items() if _was_given(context, name)}
    screen = Screen.of(sys.stderr if as_json else sys.stdout)
    try:
        ended = run(Request(given, out, cache or default_cache(), resume, overwrite, compare), screen)
    finally:
        screen.stop()
    if not ended.told:
        return INTERRUPTED if ended.how == "interrupted" else DONE
    if ended.how == "interrupted":
        again = shlex.join(
            ["wholebatch", "train", "--out", str(out), *(["--cache", str(cache)] if cache else []), "--resume"]
        )
        text = f"interrupted: step {ended.step} is saved; continue with\n\n    {again}"
        say(text, as_json, {"how": ended.how, "step": ended.step, "resume": again})
        return INTERRUPTED
    if as_json:
        say("", True, {"how": ended.how, "out": str(out), **ended.summary})
    else:
        screen.say(ending(ended.summary, Folder(out)))
        if ended.verified:
            screen.say([("verified", f"all {ended.verified} files are as they were written")])
    return DONE


def _was_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is not ParameterSource.DEFAULT
