"""The cases."""

from ._case import MULTI_STEPS, MULTI_STEPS_DONATED, OURS, UNSPLIT, Case, Setting, Target

_LOOPS = ("plain loop", UNSPLIT, "Accelerate", "Fabric", OURS)
_SIZES = ("1", "2", "4", "8", "16")
_PIECES = ("1", "16", "128", "1024")
_NARROW_GPT = {"width": 32, "layers": 1, "length": 16}
_SMALL_GPT = {"width": 32, "layers": 1, "vocabulary": 61, "length": 8}

CASES = {
    "a": Case(
        "GPT, vocabulary 50,257",
        "torch",
        "gpt",
        _LOOPS,
        tuple(Setting(size, int(size), {"vocabulary": 50257}, 5, peaks=size == "1") for size in _SIZES),
        _NARROW_GPT,
        _SMALL_GPT,
        (
            Target("time", ("1",), "plain loop", 0.65),
            Target("time", _SIZES, UNSPLIT, 1.02),
            Target("peak memory", ("1",), "plain loop", 0.90),
        ),
    ),
    "b": Case(
        "GPT, vocabulary 1,000",
        "torch",
        "gpt",
        _LOOPS,
        tuple(Setting(size, int(size), {"vocabulary": 1000}, 7, peaks=size == "1") for size in _SIZES),
        _NARROW_GPT,
        _SMALL_GPT,
    ),
    "c": Case(
        "tiny models, 64 pieces",
        "torch",
        "tiny",
        _LOOPS,
        (
            Setting("gpt", 1, {"kind": 0}, 15),
            Setting("layers", 1, {"kind": 1}, 15, repeats=4),
        ),
        {},
        {},
        (
            Target("time", ("gpt",), "plain loop", 1.02),
            Target("overhead", ("layers",), "plain loop", 10.0),
        ),
    ),
    "d": Case(
        "convolutions with GroupNorm",
        "torch",
        "images",
        _LOOPS,
        (Setting("8", 8, {}, 9, peaks=True),),
        {"side": 8},
        {"rows": 16, "side": 8},
    ),
    "e": Case(
        "rows of 16 to 512 tokens",
        "torch",
        "ragged",
        ("plain loop", "mean of means", UNSPLIT, "Accelerate", "Fabric", OURS),
        (Setting("2", 2, {}, 7, peaks=True),),
        {"width": 32, "layers": 1, "longest": 128},
        {"width": 32, "layers": 1, "vocabulary": 61, "rows": 8, "longest": 64},
        (Target("time", ("2",), "plain loop", 0.50),),
    ),
    "f": Case(
        "GPT in JAX, vocabulary 50,257",
        "jax",
        "gpt",
        ("scan by hand", UNSPLIT, "unrolled loop", "optax.microbatch", MULTI_STEPS, MULTI_STEPS_DONATED, OURS),
        tuple(Setting(size, int(size), {"vocabulary": 50257}, 5) for size in ("1", "4")),
        _NARROW_GPT,
        _SMALL_GPT,
        (
            Target("time", ("1", "4"), "scan by hand", 1.02),
            Target("temporary memory", ("1", "4"), "scan by hand", 1.02),
            Target("time", ("1",), MULTI_STEPS, 0.35),
        ),
    ),
    "g": Case(
        "cost against the number of pieces",
        "torch",
        "dense",
        ("plain loop", OURS),
        tuple(Setting(pieces, 8, {"rows": 8 * int(pieces)}, 7, peaks=True) for pieces in _PIECES),
        {"width": 32},
        {"width": 32},
        (
            Target("time per row", ("1024",), "16", 1.05),
            Target("peak memory", ("1024",), "16", 1.05),
        ),
    ),
}
