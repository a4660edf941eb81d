"""The textbook programs of gradient accumulation, each a few lines on top of the library.

    python -m wholebatch.recipes              lists them
    python -m wholebatch.recipes NAME         runs one, beside plain full batches

Each is a module of its own, which imports only its own framework.
"""

import importlib
from types import ModuleType

RECIPES = {
    "linen": "Flax Linen: one step of a TrainState on several micro-batches",
    "nnx": "Flax NNX: one update in place on two micro-batches",
    "torch_loop": "PyTorch: the training loop with accumulation, and with mixed precision",
    "scan": "JAX: a gradient summed over equal chunks by lax.scan",
    "pretrain_lm": "PyTorch: pre-training of a language model, one update every few micro-batches",
}
"""What each recipe shows, by the name of its module."""

__all__ = ["RECIPES"]


def __getattr__(name: str) -> ModuleType:
    """A recipe is imported by those who name it."""
    if name in RECIPES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
