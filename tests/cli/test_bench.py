"""`wholebatch bench`."""

import json
import subprocess
import sys

import pytest

from wholebatch import bench, cli
from wholebatch.bench._case import OURS
from wholebatch.cli import bench as command

FOUND = {"seconds": 1.0, "ratio": 1.0, "ratio_quartiles": [1.0, 1.0]}


def record(setting, quick=True, **left_out):
    timed = {} if OURS in left_out else {"plain loop": FOUND, OURS: FOUND}
    return {
        "quick": quick,
        "micro_batch_size": setting.micro_batch_size,
        "rows": 8,
        "contenders": timed,
        "left_out": left_out,
    }


@pytest.fixture
def measured(monkeypatch):
    """Nothing is measured; what a test says is what was found."""
    calls = []

    def measure(case, setting, *, quick):
        calls.append((case.title, setting.name, quick))
        yield "done", record(setting, quick)

    monkeypatch.setattr(command, "measure", measure)
    return calls


def test_a_case_is_measured_printed_written_and_drawn(in_this_process, tmp_path, capsys):
    """Without stand-ins, on a small problem."""
    out, picture = tmp_path / "results.json", tmp_path / "results.svg"
    assert cli.run(["bench", "--quick", "--case", "g/16", "--json", "--out", str(out), "--plot", str(picture)]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)["g"]["16"]
    assert json.loads(out.read_text())["g"]["16"] == found
    assert set(found["contenders"]) == {"plain loop", OURS}
    assert all(timed["peak_bytes"] >= 0 for timed in found["contenders"].values())
    assert found["machine"]["threads"] >= 1
    assert "torch" in found["versions"]
    assert "g/16: taking turns" in said.err
    assert "<svg" in picture.read_text()


def test_a_table_is_for_a_person(measured, capsys):
    assert cli.run(["bench", "--case", "c", "--quick"]) == 0
    assert [name for _, name, _ in measured] == ["gpt", "layers"]
    assert "(c) tiny models, 64 pieces" in capsys.readouterr().out


def test_an_unknown_case_is_bad_usage(capsys):
    assert cli.run(["bench", "--case", "z"]) == 2
    assert capsys.readouterr().err.strip() == "wholebatch: there is no case 'z': known are a, b, c, d, e, f, g"


def test_results_are_added_to_those_that_the_file_holds(measured, tmp_path):
    out = tmp_path / "results.json"
    assert cli.run(["bench", "--case", "c/gpt", "--out", str(out)]) == 0
    assert cli.run(["bench", "--case", "a/4", "--case", "c/layers", "--out", str(out)]) == 0
    assert {name: list(settings) for name, settings in json.loads(out.read_text()).items()} == {
        "a": ["4"],
        "c": ["gpt", "layers"],
    }


@pytest.mark.parametrize("content", ["nonsense", "[]", '{"mine": 1}'])
def test_a_file_that_holds_something_else_is_not_overwritten(measured, tmp_path, capsys, content):
    out = tmp_path / "mine.json"
    out.write_text(content)
    assert cli.run(["bench", "--case", "c", "--out", str(out)]) == 2
    assert "holds something else than results" in capsys.readouterr().err
    assert out.read_text() == content
    assert not measured


def test_a_case_whose_front_end_is_not_installed_is_left_out_and_named(measured, monkeypatch, capsys):
    monkeypatch.setattr(
        command, "missing", lambda case: {OURS: "jax is not installed"} if case.front_end == "jax" else {}
    )
    assert cli.run(["bench", "--case", "f", "--case", "d"]) == 0
    assert "(f) GPT in JAX, vocabulary 50,257: left out, jax is not installed" in capsys.readouterr().err
    assert [name for _, name, _ in measured] == ["8"]


def test_the_answer_is_no_where_ours_computes_something_else(monkeypatch, capsys):
    def measure(case, setting, *, quick):
        yield "checking", record(setting, quick, **{OURS: "computes something else: weights are off by 1e-01"})

    monkeypatch.setattr(command, "measure", measure)
    assert cli.run(["bench", "--case", "d"]) == 1
    assert "wholebatch          left out: computes something else" in capsys.readouterr().out


def test_interrupted_it_keeps_what_was_done(monkeypatch, tmp_path):
    def measure(case, setting, *, quick):
        if setting.name == "layers":
            raise KeyboardInterrupt
        yield "done", record(setting, quick)

    monkeypatch.setattr(command, "measure", measure)
    out = tmp_path / "results.json"
    assert cli.run(["bench", "--case", "c", "--out", str(out)]) == 130
    assert list(json.loads(out.read_text())["c"]) == ["gpt"]


def test_without_matplotlib_it_says_what_to_install_before_it_measures(measured, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.run(["bench", "--plot", str(tmp_path / "all.png")]) == 2
    assert 'pip install "wholebatch[bench]"' in capsys.readouterr().err
    assert not measured


def test_the_command_itself_loads_no_framework():
    program = (
        "import sys; from wholebatch._command import main; main(['bench', '--help']);"
        "assert not {'torch', 'jax', 'numpy', 'matplotlib'} & set(sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "Example: wholebatch bench" in said
    assert all(case.title in " ".join(said.split()) for case in bench.CASES.values())
