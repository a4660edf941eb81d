"""Text as the model would go on: each token drawn from what it thinks may follow."""

import numpy as np

from .backend import Backend
from .corpus import Corpus
from .sampling import SAMPLE, random_of
from .settings import Settings

TEMPERATURE = 0.8
LENGTH = 160


def continuation(settings: Settings, backend: Backend, corpus: Corpus) -> tuple[str, str]:
    """The beginning of the held-out text, and how the model continues it."""
    random = random_of(settings.seed, SAMPLE)
    prompt = corpus.held_out[: min(24, settings.seq_len // 2)].astype(np.int64)
    tokens = prompt
    for _ in range(LENGTH):
        seen = tokens[-settings.seq_len :]
        row = np.zeros((1, settings.seq_len), np.int64)  # of one shape: later tokens are not looked at
        row[0, : len(seen)] = seen
        scores = backend.logits(row)[len(seen) - 1].astype(np.float64) / TEMPERATURE
        likelihood = np.exp(scores - scores.max())
        tokens = np.append(tokens, random.choice(len(scores), p=likelihood / likelihood.sum()))
    decode = corpus.tokenizer.decode
    return decode(prompt.tolist()), decode(tokens[len(prompt) :].tolist())
