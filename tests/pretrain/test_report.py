"""What people see: the report, the comparison, and the display."""

import io
import json
import re
from html.parser import HTMLParser

import pytest
import torch
from tiny import records

from wholebatch.pretrain.charts import Chart, Line, ticks
from wholebatch.pretrain.display import Picture, Screen
from wholebatch.pretrain.report import page
from wholebatch.pretrain.summary import clock
from wholebatch.pretrain.torch_backend import TorchBackend

ALONE = {"meta", "link", "line", "circle", "polyline", "!doctype"}


class Balanced(HTMLParser):
    """Fails where an element is closed that was not opened last."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        if tag not in ALONE:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ALONE:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.seen.append(tag)


@pytest.fixture
def compared(train):
    return train("--compare", "--steps", 8)


def test_the_report_is_one_page_with_all_there_is_to_see(compared):
    shown = (compared.folder / "report.html").read_text()
    parser = Balanced()
    parser.feed(shown)
    assert parser.open == []
    assert parser.seen.count("svg") == 4
    for words in ("Validation loss", "Peak memory", "exact", "tokens/s", "Gradient norm", "Predicted memory", "three ways",
                  "What the model writes", "--batch-size", "prefers-color-scheme: dark", "width=device-width"):  # fmt: skip
        assert words in shown, words


def test_the_report_loads_nothing(compared):
    shown = (compared.folder / "report.html").read_text()
    assert not re.findall(r"https?:|<script|@import|url\(", shown)
    assert re.findall(r'(?:src|href)="([^"]*)"', shown) == ["data:,"]


def test_what_a_model_writes_does_not_become_part_of_the_page(train):
    folder = train().folder
    summary = json.loads((folder / "summary.json").read_text())
    summary["sample"] = {"prompt": "<b>", "continued": "<script>"}
    shown = page(summary, records(folder), {})
    assert "<script" not in shown
    assert "&lt;b&gt;" in shown


def test_the_comparison_tells_the_three_apart(compared):
    ways = {way["name"]: way for way in json.loads((compared.folder / "comparison.json").read_text())["ways"]}
    assert ways["wholebatch"]["difference"] < 1e-12
    assert ways["the unsplit batch"]["difference"] == 0
    assert ways["the textbook loop"]["difference"] > 1e-4
    assert ways["wholebatch"]["peak_memory"] < ways["the unsplit batch"]["peak_memory"]
    assert all(way["seconds_per_step"] > 0 for way in ways.values())
    assert "the textbook loop" in compared.out


def test_an_unsplit_batch_that_does_not_fit_is_told(train, monkeypatch):
    real = TorchBackend.plain_step

    def plain_step(self, pieces, *given):
        if len(pieces) == 1:
            raise torch.OutOfMemoryError
        real(self, pieces, *given)

    monkeypatch.setattr(TorchBackend, "plain_step", plain_step)
    ran = train("--compare")
    assert ran.code == 0, ran.error
    assert "the unsplit batch  did not fit the memory\n" in ran.out
    assert ran.out.count("weights not compared") == 2
    assert "<td>did not fit the memory</td>" in (ran.folder / "report.html").read_text()


def test_what_else_goes_wrong_in_the_comparison_is_not_hidden(train, monkeypatch):
    def plain_step(*_):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(TorchBackend, "plain_step", plain_step)
    ran = train("--compare")
    assert (ran.code, ran.error) == (3, "wholebatch: RuntimeError: shapes do not match")


def test_a_run_that_is_done_is_compared_afterwards(train):
    before = (train().folder / "metrics.jsonl").read_text()
    ran = train("--resume", "--compare", tiny=False)
    assert "the textbook loop" in ran.out
    assert (ran.folder / "metrics.jsonl").read_text() == before


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_picture_and_a_file_gets_lines(train):
    terminal, shown = Terminal(), records(train().folder)
    screen = Screen.of(terminal)
    assert isinstance(screen, Picture)
    screen.note("reading")
    screen.start([("batch", "5 rows")], steps=6, done=0)
    for record in shown:
        screen.step(record)
    screen.warn("look")
    screen.stop()
    screen.stop()
    said = terminal.getvalue()
    for words in (
        "batch",
        "step 6/6",
        "loss",
        "validation",
        "gradient norm",
        "tokens/s",
        "2 rows at a time",
        "peak",
        "left",
    ):
        assert words in said
    assert "step 6/6" in train("--overwrite").out


def test_a_screen_of_nobody_shows_nothing(capsys):
    screen = Screen()
    screen.say([("a", "b")])
    screen.note("reading")
    screen.start([], 1, 0)
    screen.warn("look")
    screen.stop()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (1, 4, [1, 1.5, 2, 2.5, 3, 3.5, 4]), (1, 120, [20, 40, 60, 80, 100, 120])],
)
def test_axes_have_round_numbers(low, high, expected):
    assert [round(tick, 6) for tick in ticks(low, high, 5)] == pytest.approx(expected)


@pytest.mark.parametrize("value", [0.0, 3.0, -2.0])
def test_an_axis_of_one_value_has_room_around_it(value):
    marks = ticks(value, value, 5)
    assert len(marks) > 1
    assert marks[0] <= value <= marks[-1]


def test_a_chart_of_one_point_is_drawn():
    assert "<polyline" in Chart([Line("a", [(1.0, 2.0)])], "step", str).svg("one")


@pytest.mark.parametrize(("seconds", "said"), [(5, "5 s"), (61, "1 min 1 s"), (7500, "2 h 5 min")])
def test_durations(seconds, said):
    assert clock(seconds) == said
