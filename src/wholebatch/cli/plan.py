"""`wholebatch plan`: which micro-batch fits a memory budget?"""

import importlib
from types import ModuleType
from typing import Any

import click

from .._errors import BudgetError, OptionError
from . import DONE, NO, Command, say
from ._target import front_end, load


@click.command(
    "plan",
    cls=Command,
    example="wholebatch plan train.py:make --memory 24GiB --optimizer adamw",
    short_help="say which micro-batch fits a memory budget",
)
@click.argument("target")
@click.option("--memory", required=True, help='The budget, such as "24GiB" or "800MB".')
@click.option("--optimizer", help="Count its state and step too: a name in torch.optim or optax, such as adamw.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Draw the peak by micro-batch size to this file.")
def command(target: str, memory: str, optimizer: str | None, plot: str | None, as_json: bool) -> int:
    """Find the largest micro-batch whose step fits the memory, without running it.

    TARGET is module:factory or file.py:factory, a function without arguments that returns (model, loss_fn, batch) for
    PyTorch, where the model may be on the meta device, or (fun, params, *batch) for JAX. The exit code is 1 if not even
    one row fits.
    """
    given = load(target)
    library = front_end(given)
    try:
        plan = library.plan(*given, memory=memory, optimizer=optimizer and _named(optimizer, library))
    except BudgetError as error:
        say(str(error), as_json, {"fits": False, "needed": error.needed})
        return NO
    if plot is not None:
        plan.plot(plot)
    say(str(plan), as_json, {"fits": True, **plan.as_json()})
    return DONE


def _named(name: str, library: ModuleType) -> Any:
    """The optimizer of that name, from where the front end's users take theirs."""
    for_jax = library.__name__.endswith("jax")
    source = importlib.import_module("optax" if for_jax else "torch.optim")
    by_name = {known.lower(): made for known, made in vars(source).items() if callable(made)}
    if name.lower() not in by_name or name.lower() == "optimizer":
        raise OptionError(f"{source.__name__} has no optimizer {name!r}")
    return by_name[name.lower()](1e-3) if for_jax else by_name[name.lower()]
