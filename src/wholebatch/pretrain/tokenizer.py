"""From text to numbers and back: bytes, or byte-level BPE by the `tokenizers` library."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from .errors import DataError

END = "<|endoftext|>"
AT_A_TIME = 64  # documents


class Tokenizer(Protocol):
    """What the rest needs of a tokenizer."""

    name: str
    size: int

    def encode(self, documents: Iterable[str]) -> Iterator[Sequence[int]]:
        """Each document's tokens, and the mark that ends it if there is one."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text."""

    def to_json(self) -> str:
        """What `read` makes it from again."""


class Bytes:
    """Each byte is a token, and one more ends a document."""

    name = "bytes"
    size = 257

    def encode(self, documents: Iterable[str]) -> Iterator[Sequence[int]]:
        for document in documents:
            yield [*document.encode(), 256]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def to_json(self) -> str:
        return '{"type": "bytes"}\n'


class Bpe:
    """A tokenizer of the `tokenizers` library.

    Args:
        tokenizer: the library's.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.size: int = tokenizer.get_vocab_size()
        self.name = f"BPE of {self.size:,}"
        end = tokenizer.token_to_id(END)
        self._end = [] if end is None else [end]

    @classmethod
    def trained(cls, documents: Iterable[str], vocab_size: int) -> "Bpe":
        """Byte-level BPE that was learnt from documents.

        Args:
            documents: the text.
            vocab_size: the most tokens that it may have; a short text gives fewer.
        """
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(documents, trainer)
        return cls(tokenizer)

    def encode(self, documents: Iterable[str]) -> Iterator[Sequence[int]]:
        batch: list[str] = []
        for document in documents:
            batch.append(document)
            if len(batch) == AT_A_TIME:
                yield from self._encode(batch)
                batch = []
        yield from self._encode(batch)

    def _encode(self, batch: list[str]) -> Iterator[Sequence[int]]:
        for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield encoding.ids + self._end

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens))

    def to_json(self) -> str:
        return str(self._tokenizer.to_str())


def read(path: Path) -> Tokenizer:
    """A tokenizer from a file of the `tokenizers` library, such as a model's `tokenizer.json`."""
    if not path.is_file():
        raise DataError(f'--tokenizer must be "bpe", "bytes" or a file, and there is no file {path}')
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain ones
        raise DataError(f"{path} is not a tokenizer file of the tokenizers library: {error}") from error


def from_json(text: str) -> Tokenizer:
    """The tokenizer that `to_json` wrote."""
    return Bytes() if text == Bytes().to_json() else Bpe(tokenizers.Tokenizer.from_str(text))


def digest(tokenizer: Tokenizer) -> str:
    """What stands for a tokenizer."""
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()
