"""Text as one long row of tokens, in a memory-mapped file that is named after its content.

tokens = [ ... to train on ... | held out ]
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from . import tokenizer as tokenizers
from .errors import DataError
from .files import write_file, write_text
from .settings import Settings
from .text import Text
from .tokenizer import Bpe, Bytes, Tokenizer

HELD_OUT = 0.05
CHUNK = 1 << 22

Tokens = npt.NDArray[np.integer]


@dataclass(frozen=True)
class Corpus:
    """What a run trains on.

    Args:
        digest: stands for the text.
        name: what people call it.
        tokenizer: what made the tokens.
        training: the tokens to train on.
        held_out: the others, to validate with.
    """

    digest: str
    name: str
    tokenizer: Tokenizer
    training: Tokens
    held_out: Tokens


def prepare(settings: Settings, cache: Path, tokenizer: Tokenizer | None = None) -> Corpus:
    """Read, tokenize and divide the text of a run; whatever was done before comes from the cache.

    Args:
        settings: what to read, and how.
        cache: a folder for tokenizers and tokens, which may be shared by all runs.
        tokenizer: the one of a run that is continued.
    """
    text = Text(settings.data, settings.field)
    digest = text.digest()
    tokenizer = tokenizer or _tokenizer(settings, text, digest, cache)
    tokens = _tokens(tokenizer, text, digest, cache)
    training, held_out = _divided(tokens, settings.seq_len)
    return Corpus(digest, text.name, tokenizer, training, held_out)


def default_cache() -> Path:
    """Where people's caches are."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wholebatch"


def _tokenizer(settings: Settings, text: Text, digest: str, cache: Path) -> Tokenizer:
    if settings.tokenizer == "bytes":
        return Bytes()
    if settings.tokenizer != "bpe":
        return tokenizers.read(Path(settings.tokenizer))
    kept = cache / f"bpe-{_key(digest, str(settings.vocab_size))}.json"
    if kept.is_file():
        return tokenizers.read(kept)
    trained = Bpe.trained(text.documents(), settings.vocab_size)
    write_text(kept, trained.to_json())
    return trained


def _tokens(tokenizer: Tokenizer, text: Text, digest: str, cache: Path) -> Tokens:
    kept = cache / f"tokens-{_key(digest, tokenizers.digest(tokenizer))}.npy"
    try:
        tokens: Tokens = np.load(kept, mmap_mode="r")
    except (OSError, ValueError, EOFError):  # not there, or cut off
        write_file(kept, lambda beside: _write(beside, tokenizer, text))
        tokens = np.load(kept, mmap_mode="r")
    return tokens


def _write(path: Path, tokenizer: Tokenizer, text: Text) -> None:
    """In two passes over a file, since a .npy begins with its length and the text may not fit the memory."""
    dtype = np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)
    raw = path.with_suffix(".raw")
    try:
        with raw.open("wb") as file:
            for document in tokenizer.encode(text.documents()):
                file.write(np.asarray(document, dtype).tobytes())
        count = raw.stat().st_size // dtype.itemsize
        with path.open("wb") as file, raw.open("rb") as tokens:
            header = {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
            np.lib.format.write_array_header_2_0(file, header)
            while chunk := tokens.read(CHUNK):
                file.write(chunk)
    finally:
        raw.unlink(missing_ok=True)


def _divided(tokens: Tokens, seq_len: int) -> tuple[Tokens, Tokens]:
    """The end is held out: at least one sequence and the token that follows it."""
    least = seq_len + 1
    if len(tokens) < 2 * least:
        raise DataError(
            f"the text has {len(tokens):,} tokens, and {2 * least:,} are needed for one sequence of {seq_len} to train "
            "on and one to validate with: give more text, or a smaller --seq-len"
        )
    held_out = max(least, int(HELD_OUT * len(tokens)))
    return tokens[:-held_out], tokens[-held_out:]


def _key(*parts: str) -> str:
    return hashlib.sha256("/".join(parts).encode()).hexdigest()[:20]
