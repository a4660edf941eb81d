"""`wholebatch check`: is a split exact on this model, and if not, why?"""

import click

from . import DONE, NO, Command, say
from ._target import front_end, load


@click.command(
    "check",
    cls=Command,
    example="wholebatch check train.py:make --micro-batch-size 8",
    short_help="say whether a split is exact on a model, and why not",
)
@click.argument("target")
@click.option("--micro-batch-size", type=int, help="A size of the pieces to try besides the usual ones.")
def command(target: str, micro_batch_size: int | None, as_json: bool) -> int:
    """Compare the gradient of a batch with that of its pieces, and say why they differ.

    TARGET is module:factory or file.py:factory, a function without arguments that returns (model, loss_fn, batch) for
    PyTorch or (fun, params, *batch) for JAX. The exit code is 0 if the split is exact and 1 if it is not.
    """
    given = load(target)
    report = front_end(given).check(*given, micro_batch_size=micro_batch_size)
    say(str(report), as_json, report.as_json())
    return DONE if report.exact else NO
