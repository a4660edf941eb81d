"""Bad input: each is one line that says what to do, and exit code 2."""

import json
import sys

import pytest
from tiny import TINY


def written(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    return path


def lines(*objects):
    return "\n".join(map(json.dumps, objects)).encode()


FILES = [
    ("missing.txt", None, [], "there is no file or folder "),
    ("empty.txt", b"", [], "is empty: there is nothing to train on"),
    ("blank.txt", b" \n\n", [], "is empty: there is nothing to train on"),
    ("short.txt", b"a few bytes", [], "the text has 12 tokens, and 18 are needed for one sequence of 8 to train on"),
    ("latin.txt", "für".encode("latin1") * 99, [], "is not UTF-8 text (byte 0xfc at position 1): convert it"),
    ("rows.jsonl", b"{", ["--field", "text"], "line 1 of "),
    ("rows.jsonl", b"\n \n", ["--field", "text"], "is empty: there is nothing to train on"),
    ("rows.jsonl", b'{"text": "\xfc"}', ["--field", "text"], "is not JSON: 'utf-8' codec can't decode byte 0xfc"),
    ("rows.jsonl", lines({"text": "x"}, {"body": "y"}), ["--field", "text"], "has no text in the field 'text': it has body"),
    ("rows.jsonl", lines({"text": "\ud800"}), ["--field", "text"], "has half a character (a lone surrogate) in the field"),
    ("rows.jsonl", lines({"text": 3}), ["--field", "text"], "has no text in the field 'text'"),
    ("rows.jsonl", lines([1]), ["--field", "text"], "has no text in the field 'text': it has list"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "options", "message"), FILES)
def test_text_that_cannot_be_used(train, tmp_path, name, content, options, message):
    path = tmp_path / name if content is None else written(tmp_path, name, content)
    ran = train(*options, data=path)
    assert ran.code == 2
    assert str(path) in ran.error or "the text has" in ran.error
    assert message in ran.error
    assert "\n" not in ran.error


OPTIONS = [
    (["--heads", 3], "--heads 3 does not divide --width 8: give 2 or 4"),
    (["--steps", 0], "--steps must be at least 1, got 0"),
    (["--tokens", 0, "--width", 8], "both --steps and --tokens were given"),
    (["--batch-size", -1], "--batch-size must be at least 1, got -1"),
    (["--micro-batch-size", 9], "--micro-batch-size 9 is more than --batch-size 5"),
    (["--micro-batch-size", "some"], "--micro-batch-size must be \"auto\" or a number of rows, got 'some'"),
    (["--micro-batch-size", 0], "--micro-batch-size must be at least 1, got 0"),
    (["--dropout", 1], "--dropout must be at least 0 and less than 1, got 1"),
    (["--lr", "nan"], "--lr must be greater than 0 and finite, got nan"),
    (["--memory", "lots"], 'memory must be a number and a unit, such as "24GiB"'),
    (["--memory", "1KiB", "--micro-batch-size", "auto"], "memory=1.00 KiB is too little: a step needs "),
    (["--tokenizer", "none.json"], '--tokenizer must be "bpe", "bytes" or a file, and there is no file none.json'),
    (["--tokenizer", "bpe", "--vocab-size", 100], "--vocab-size must be at least 257, got 100"),
    (["--precision", "fp8"], "'fp8' is not one of"),
    (["--resume", "--overwrite"], "both --resume and --overwrite were given"),
    (["--batch-sise", 4], "No such option '--batch-sise'. (Did you mean one of: '--base-batch-size', '--batch-size'"),
]


@pytest.mark.parametrize(
    ("options", "message"), OPTIONS, ids=lambda given: " ".join(map(str, given)) if isinstance(given, list) else ""
)
def test_options_that_cannot_be_used(train, options, message):
    ran = train(*options)
    assert ran.code == 2, ran.error
    assert message in ran.error
    assert "\n" not in ran.error


def test_a_file_that_is_no_tokenizer(train, tmp_path):
    ran = train("--tokenizer", written(tmp_path, "tokenizer.json", b"{"))
    assert ran.code == 2
    assert "is not a tokenizer file of the tokenizers library" in ran.error


def test_an_empty_folder(train, tmp_path):
    (tmp_path / "books").mkdir()
    ran = train(data=tmp_path / "books")
    assert (ran.code, ran.error) == (2, f"wholebatch: the folder {tmp_path / 'books'} holds no files")


def test_a_folder_that_holds_another_run(train):
    train()
    ran = train()
    assert ran.code == 2
    assert ran.error == (
        f"wholebatch: {ran.folder} holds another run: --resume continues it, --overwrite replaces it, --out puts this one "
        "elsewhere"
    )
    assert train("--overwrite").code == 0


def test_a_run_is_not_removed_for_one_that_cannot_begin(train, tmp_path):
    train()
    assert train("--overwrite", data=tmp_path / "missing").code == 2
    assert train("--overwrite", "--heads", 3).code == 2
    assert "files are as they were written" in train("--resume", tiny=False).out


def test_bad_input_leaves_nothing_behind(train, tmp_path):
    assert not train("--heads", 3).folder.exists()


def test_what_is_no_run_stays_when_a_run_is_replaced(train):
    ours = train().folder / "notes.txt"
    ours.write_text("mine")
    train("--overwrite")
    assert ours.read_text() == "mine"


def test_an_output_that_is_a_file(train, text):
    ran = train(out=text.name)
    assert (ran.code, ran.error) == (2, f"wholebatch: --out {text} is a file: give a folder")


@pytest.mark.parametrize(("backend", "module"), [("torch", "torch"), ("jax", "flax")])
def test_a_backend_that_is_not_installed(train, monkeypatch, backend, module):
    monkeypatch.setitem(sys.modules, module, None)
    ran = train("--backend", backend)
    assert ran.code == 2
    assert ran.error == f'wholebatch: the {backend} backend is not installed: pip install "wholebatch[{backend},cli]"'


def test_what_is_said_names_options_that_exist():
    from wholebatch.cli.train import command
    from wholebatch.pretrain.settings import Settings, option

    known = {name for parameter in command.params for name in parameter.opts}
    assert {option(name) for name in Settings.__dataclass_fields__} <= known
    assert set(TINY[::2]) <= known
