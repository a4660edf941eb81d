"""From text to the rows of a step."""

import json

import numpy as np
import pytest
from tiny import write_text

from wholebatch.pretrain import corpus, sampling
from wholebatch.pretrain import tokenizer as tokenizers
from wholebatch.pretrain.settings import Settings
from wholebatch.pretrain.text import Text
from wholebatch.pretrain.tokenizer import Bpe, Bytes

POEM = "Grüße, Welt!\n\tthe   cat (sat) on 1,234 mats — 猫\n"


@pytest.mark.parametrize("make", [Bytes, lambda: Bpe.trained([POEM] * 9, 300)], ids=["bytes", "bpe"])
def test_text_survives_its_tokens(make):
    made = make()
    (tokens,) = made.encode([POEM])
    assert max(tokens) < made.size
    assert made.decode(tokens) == POEM
    again = tokenizers.from_json(made.to_json())
    assert list(again.encode([POEM])) == [tokens]
    assert tokenizers.digest(again) == tokenizers.digest(made)


def test_a_trained_tokenizer_needs_fewer_tokens_and_ends_each_document():
    made = Bpe.trained([POEM] * 9, 300)
    assert 257 < made.size <= 300
    documents = list(made.encode([POEM] * 100))
    assert len(documents) == 100
    assert len(documents[0]) < len(POEM.encode())
    assert all(document[-1] == 0 and 0 not in document[:-1] for document in documents)


def test_training_a_tokenizer_is_the_same_each_time():
    assert Bpe.trained([POEM] * 9, 300).to_json() == Bpe.trained([POEM] * 9, 300).to_json()


def test_folders_are_read_in_order_without_what_is_hidden(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/.hidden", ".git/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert list(Text([str(tmp_path)]).documents()) == ["a/z.txt", "b.txt"]


def test_json_lines_are_a_document_each(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n".join(json.dumps({"text": text, "id": 1}) for text in ("one", "two")))
    assert list(Text([str(path)], "text").documents()) == ["one", "two"]


def test_only_a_newline_ends_a_line_of_json(tmp_path):
    """JSON may hold the other line ends of Unicode as they are."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "one\u2028two\x85three"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert list(Text([str(path)], "text").documents()) == ["one\u2028two\x85three"]


def test_the_digest_is_of_the_content_and_not_of_its_place(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(POEM)
    first, second = (Text([str(tmp_path / name)]).digest() for name in ("a", "b"))
    assert first == second
    (tmp_path / "b").write_text(POEM + " ")
    assert Text([str(tmp_path / "b")]).digest() != first


def test_without_data_there_is_the_standard_library():
    text = Text()
    assert "abc.py" in {file.name for file in text.files}
    assert text.files == sorted(text.files)


@pytest.fixture
def settings(tmp_path):
    return Settings.of({"data": [str(write_text(tmp_path / "text.txt"))], "vocab_size": 300, "seq_len": 8})


def test_tokens_are_made_once_and_read_from_a_file(settings, tmp_path, monkeypatch):
    first = corpus.prepare(settings, tmp_path / "cache")
    monkeypatch.setattr(Bpe, "trained", None)
    monkeypatch.setattr(Bpe, "encode", None)
    again = corpus.prepare(settings, tmp_path / "cache")
    assert isinstance(again.training, np.memmap)
    assert (again.training == first.training).all()
    assert first.training.dtype == np.uint16
    assert len(first.held_out) == int(0.05 * (len(first.training) + len(first.held_out)))


@pytest.mark.parametrize("length", [0, 50, 300])
def test_a_file_of_tokens_that_was_cut_off_is_made_again(settings, tmp_path, length):
    first = np.array(corpus.prepare(settings, tmp_path / "cache").training)
    (kept,) = (tmp_path / "cache").glob("*.npy")
    kept.write_bytes(kept.read_bytes()[:length])
    assert (corpus.prepare(settings, tmp_path / "cache").training == first).all()


def test_a_tokenizer_may_come_from_a_file(settings, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(Bpe.trained([POEM] * 9, 280).to_json())
    given = Settings.of({**settings.as_dict(), "tokenizer": str(path)})
    assert corpus.prepare(given, tmp_path / "cache").tokenizer.size <= 280


def test_caches_are_where_people_have_them(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert corpus.default_cache() == tmp_path / "wholebatch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert corpus.default_cache().parts[-2:] == (".cache", "wholebatch")


def test_the_rows_of_a_step_depend_on_the_seed_and_on_the_step_alone():
    tokens = np.arange(1000)
    of = {
        (seed, step): sampling.batch_of_step(tokens, step=step, rows=5, length=7, seed=seed)
        for step in (2, 1)
        for seed in (0, 1)
    }
    again = sampling.batch_of_step(tokens, step=1, rows=5, length=7, seed=0)
    assert (of[0, 1] == again).all()
    assert len({rows.tobytes() for rows in of.values()}) == 4
    assert (np.diff(again) == 1).all()
    assert again.shape == (5, 8)


def test_validation_is_spread_over_what_is_held_out():
    rows = sampling.spread_over(np.arange(100), rows=4, length=10)
    assert rows[0, 0] == 0
    assert rows[-1, -1] == 99
    assert sampling.spread_over(np.arange(25), rows=4, length=10).shape == (2, 11)
