"""What `wholebatch train` costs over the bare library step: data, metrics, display and checkpoints, on the same model.

    python benchmarks/train_overhead.py [--steps N] [--micro-batch-size N]

Two models from the same seed take turns, a step each: one inside the command's own loop, with its display on a
terminal, its metrics on the disk and a checkpoint every 25 steps; the other by `Accumulator.step` on batches that are
there already. Afterwards both must have the same weights. Prints the median of the steps' ratios, and the ratio of the
sums, which hold checkpoints and the validation at the end, of which the bare step has none.
"""

import argparse
import io
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from wholebatch.pretrain import Settings, loop
from wholebatch.pretrain.corpus import default_cache, prepare
from wholebatch.pretrain.display import Screen
from wholebatch.pretrain.folder import Folder
from wholebatch.pretrain.ranks import Ranks
from wholebatch.pretrain.schedule import learning_rate
from wholebatch.pretrain.torch_backend import STEPS_TO_WATCH, TorchBackend
from wholebatch.pretrain.writer import Writer
from wholebatch.torch import Accumulator


class Terminal(io.StringIO):
    """A terminal that nobody looks at: the picture is drawn all the same."""

    def isatty(self) -> bool:
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--micro-batch-size", type=int, default=13)
    steps, size = vars(parser.parse_args()).values()
    settings = Settings.of({"steps": steps, "micro_batch_size": size, "validate_every": steps})
    corpus = prepare(settings, default_cache())
    inside, bare = (TorchBackend(settings, corpus.tokenizer.size, Ranks.alone()) for _ in range(2))
    accumulator = Accumulator(bare._model, micro_batch_size=size)
    rows = [torch.from_numpy(loop.rows_of_step(settings, corpus, step)) for step in range(1, steps + 1)]

    def bare_step(step: int) -> float:
        start = time.perf_counter()
        for group in bare._optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        loss_fn = bare._loss_fn(bare._model)
        result = accumulator.step(loss_fn, rows[step - 1], bare._optimizer, max_norm=settings.max_norm)
        result.loss.item()
        return time.perf_counter() - start

    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as place:
        writer = Writer(Folder(Path(place)), inside, {}, keep=2, saved=None)
        screen = Screen.of(Terminal())
        screen.start([], steps, 0)
        records = loop.train(settings, inside, corpus, done=0, writer=writer)
        for step in range(1, steps + 1):
            if step % 2:
                theirs.append(bare_step(step))
            start = time.perf_counter()
            screen.step(next(records))
            ours.append(time.perf_counter() - start)
            if not step % 2:
                theirs.append(bare_step(step))
        screen.stop()
    same = all(np.array_equal(inside.state().weights[name], array) for name, array in bare.state().weights.items())
    assert same, "the two do not end with the same weights"
    ours, theirs = ours[STEPS_TO_WATCH:], theirs[STEPS_TO_WATCH:]
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    print(
        json.dumps(
            {
                "median_ratio": round(statistics.median(pairs), 4),
                "quartiles": [round(q, 4) for q in statistics.quantiles(pairs, n=4)],
                "ratio_of_medians": round(statistics.median(ours) / statistics.median(theirs), 4),
                "ratio_of_sums_with_checkpoints_and_a_validation": round(sum(ours) / sum(theirs), 4),
                "seconds_per_step": round(statistics.median(theirs), 4),
                "steps": len(ours),
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
