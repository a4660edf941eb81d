"""What a run is: everything that its weights depend on, and how often it saves them.

Options that were not given come from the run that is continued, else from the model's preset, else from here.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from .._budget import bytes_of, in_units
from .._errors import OptionError

BACKENDS = ("torch", "jax")
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
RULES = ("none", "linear", "sqrt")

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"width": 128, "layers": 4, "heads": 4, "seq_len": 128, "vocab_size": 2048, "lr": 3e-3, "memory": "128MiB"},
    "small": {"width": 384, "layers": 6, "heads": 6, "seq_len": 256, "vocab_size": 8192, "lr": 1e-3, "memory": "1GiB"},
    "base": {
        "width": 768,
        "layers": 12,
        "heads": 12,
        "seq_len": 512,
        "vocab_size": 32768,
        "lr": 6e-4,
        "memory": "4GiB",
    },
}

MAY_CHANGE = {"data", "field", "checkpoint_every", "keep", "validate_every"}
"""When a run is continued; the text is compared by content."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A run's settings, checked.

    Args:
        data: files and folders of text; none means the source of Python's standard library.
        field: read them as JSON lines, and take this field.
        tokenizer: "bpe", trained on the text, "bytes", or a file of the `tokenizers` library.
        vocab_size: the most tokens of a trained tokenizer.
        backend: "torch" or "jax".
        model: the preset that options which were not given come from.
        width: of the model.
        layers: its blocks.
        heads: of its attention.
        seq_len: tokens of a row.
        dropout: the probability with which an entry is dropped.
        batch_size: rows of an optimizer step.
        micro_batch_size: rows in memory at a time; None finds the most that the memory holds.
        memory: the budget for that, in bytes.
        lr: the learning rate for `base_batch_size` rows.
        lr_rule: how it follows the batch size.
        base_batch_size: the rows that `lr` was chosen for.
        warmup: optimizer steps until the learning rate is reached.
        max_norm: gradients are clipped to this norm.
        precision: what is computed in; weights are float32, or float64 for "fp64".
        steps: optimizer steps.
        seed: of weights, batches and dropout.
        validate_every: steps between validations.
        checkpoint_every: steps between checkpoints.
        keep: how many checkpoints stay.
    """

    data: tuple[str, ...] = ()
    field: str | None = None
    tokenizer: str = "bpe"
    vocab_size: int
    backend: str = "torch"
    model: str = "tiny"
    width: int
    layers: int
    heads: int
    seq_len: int
    dropout: float = 0.0
    batch_size: int = 64
    micro_batch_size: int | None = None
    memory: int
    lr: float
    lr_rule: str = "none"
    base_batch_size: int = 64
    warmup: int
    max_norm: float = 1.0
    precision: str = "fp32"
    steps: int
    seed: int = 0
    validate_every: int
    checkpoint_every: int = 25
    keep: int = 2

    @classmethod
    def of(cls, given: Mapping[str, Any], stored: Mapping[str, Any] | None = None) -> Self:
        """The settings that were asked for.

        Args:
            given: the options that were given, by name; `tokens` in place of `steps`.
            stored: the settings of the run that is continued.

        >>> Settings.of({"model": "small", "batch_size": 512}).width
        384
        """
        given = dict(given)
        preset = given.get("model", "tiny")
        if preset not in PRESETS:
            raise OptionError(f"--model must be one of {', '.join(PRESETS)}, got {preset!r}")
        start = dict(PRESETS[preset]) if stored is None or "model" in given else {}
        values = {**(stored or {}), **start, **given}
        values["data"] = tuple(values.get("data") or ())
        values["micro_batch_size"] = _rows(values.get("micro_batch_size"))
        values["memory"] = bytes_of(values["memory"])
        tokens = values.pop("tokens", None)
        if tokens is not None:
            if "steps" in given:
                raise OptionError("both --steps and --tokens were given: each says how long to train")
            _at_least(1, "tokens", tokens)
            row = values.get("batch_size", cls.batch_size) * values["seq_len"]
            values["steps"] = math.ceil(tokens / max(1, row))
        steps = values.setdefault("steps", STEPS)
        values.setdefault("warmup", max(1, steps // 10))
        values.setdefault("validate_every", max(1, steps // 10))
        settings = cls(**values)
        settings._refuse()
        return settings

    def as_dict(self) -> dict[str, Any]:
        """For JSON, and back with `of({}, stored)`."""
        return {**dataclasses.asdict(self), "data": list(self.data)}

    def differences(self, stored: Mapping[str, Any]) -> list[str]:
        """Which settings are others than those of a run that is to be continued."""
        now = self.as_dict()
        return [
            f"{option(name)} was {shown(name, stored.get(name))} and is {shown(name, value)}"
            for name, value in now.items()
            if name not in MAY_CHANGE and stored.get(name) != value
        ]

    def _refuse(self) -> None:
        for name, choices in {"backend": BACKENDS, "precision": PRECISIONS, "lr_rule": RULES}.items():
            if getattr(self, name) not in choices:
                raise OptionError(f"{option(name)} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        whole = ("width", "layers", "heads", "seq_len", "batch_size", "base_batch_size", "steps")
        for name in (*whole, "validate_every", "checkpoint_every", "keep"):
            _at_least(1, name, getattr(self, name))
        if self.micro_batch_size is not None:
            _at_least(1, "micro_batch_size", self.micro_batch_size)
            if self.micro_batch_size > self.batch_size:
                raise OptionError(
                    f"--micro-batch-size {self.micro_batch_size} is more than --batch-size {self.batch_size}"
                )
        _at_least(0, "warmup", self.warmup)
        _at_least(0, "seed", self.seed)
        if self.tokenizer == "bpe":
            _at_least(257, "vocab_size", self.vocab_size)
        if self.width % self.heads:
            fitting = [n for n in range(1, self.width + 1) if self.width % n == 0]
            nearest = sorted(fitting, key=lambda n: abs(n - self.heads))[:2]
            raise OptionError(
                f"--heads {self.heads} does not divide --width {self.width}: give {' or '.join(map(str, nearest))}"
            )
        if not 0 <= self.dropout < 1:
            raise OptionError(f"--dropout must be at least 0 and less than 1, got {self.dropout:g}")
        for name in ("lr", "max_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise OptionError(f"{option(name)} must be greater than 0 and finite, got {getattr(self, name):g}")


STEPS = 160
"""What two cores manage in a minute or two."""


def option(name: str) -> str:
    """What a setting is called on the command line."""
    return "--" + name.replace("_", "-")


def shown(name: str, value: Any) -> str:
    """A setting as people write it."""
    if name == "memory" and isinstance(value, int):
        return in_units(value)
    if name == "micro_batch_size" and value is None:
        return "auto"
    return ", ".join(value) if isinstance(value, list) else str(value)


def _rows(size: int | str | None) -> int | None:
    """From the command line it comes as it was written."""
    if size is None or size == "auto":
        return None
    try:
        return int(size)
    except ValueError as error:
        raise OptionError(f'--micro-batch-size must be "auto" or a number of rows, got {size!r}') from error


def _at_least(least: int, name: str, value: int) -> None:
    if value < least:
        raise OptionError(f"{option(name)} must be at least {least}, got {value}")
