"""What a measurement comes to: verdicts, tables, pictures, and the tables of README and docs."""

import importlib.util
import json
from pathlib import Path

import pytest

from wholebatch.bench import CASES
from wholebatch.bench._case import OURS, SAME
from wholebatch.bench._plot import plot
from wholebatch.bench._report import seconds, table
from wholebatch.bench._targets import verdicts

ROOT = Path(__file__).parent.parent.parent


def contender(ratio, **facts):
    return {"seconds": ratio, "ratio": ratio, "ratio_quartiles": [ratio, ratio], "difference": 0.0, **facts}


def record(contenders, rows=16, size=1, **left_out):
    return {
        "quick": False,
        "rows": rows,
        "micro_batch_size": size,
        "left_out": left_out,
        "contenders": contenders,
        "work": {"operations": 1e9, "bytes": 1e9},
        "limits": {"operations": 1e10, "bytes": 1e10},
    }


A = {
    "1": record(
        {
            "plain loop": contender(1.0, peak_bytes=100 * 2**20),
            "unsplit batch": contender(0.5, peak_bytes=300 * 2**20),
            OURS: contender(0.6, peak_bytes=80 * 2**20),
        },
        Fabric="lightning is not installed",
    )
}
G = {
    pieces: record({"plain loop": contender(1.0, peak_bytes=8), OURS: contender(time, peak_bytes=peak)}, rows, 8)
    for pieces, rows, time, peak in (("16", 128, 1.0, 10), ("1024", 8192, 63.0, 11))
}
F = {
    "1": record(
        {
            "scan by hand": contender(1.0, temporary_bytes=100, compile_seconds=2.0),
            "optax.MultiSteps": contender(4.0, temporary_bytes=90, compile_seconds=2.0),
            OURS: contender(1.01, temporary_bytes=100, compile_seconds=2.0),
        }
    )
}
C = {"layers": record({"plain loop": contender(1.0), OURS: contender(1.00128)}, 64, 1)}


def test_a_target_holds_or_is_missed():
    said = [str(verdict) for verdict in verdicts("a", A)]
    assert said == [
        "a/1: time over plain loop: 0.60, at most 0.65: holds",
        "a/1: time over unsplit batch: 1.20, at most 1.02: MISSED",
        "a/1: peak memory over plain loop: 0.80, at most 0.90: holds",
    ]


def test_settings_are_compared_with_each_other_by_the_row():
    by_measure = {verdict.target.measure: verdict.measured for verdict in verdicts("g", G)}
    assert by_measure["time per row"] == pytest.approx(63 / 64)
    assert by_measure["peak memory"] == pytest.approx(1.1)


def test_overhead_is_in_microseconds_a_piece():
    (verdict,) = verdicts("c", C)
    assert verdict.measured == pytest.approx(20.0)
    assert not verdict.holds


def test_temporary_memory_is_compared_as_peaks_are():
    measured = [verdict.measured for verdict in verdicts("f", F)]
    assert measured == pytest.approx([1.01, 1.0, 1.01 / 4])


def test_what_was_not_measured_has_no_verdict():
    assert not list(verdicts("g", {"16": G["16"]}))
    assert not list(verdicts("a", {"1": record({"plain loop": contender(1.0)})}))


def test_the_table_holds_ratios_limits_verdicts_and_who_was_left_out():
    said = table({"a": A, "f": F})
    assert "(a) GPT, vocabulary 50,257" in said
    assert "Fabric              left out: lightning is not installed" in said
    assert "10 Gop/s in a matrix product, 10.0 GB/s in a copy; at these a step takes at least 200.0 ms" in said
    assert "0.80" in next(line for line in said.splitlines() if OURS in line)
    assert "a/1: time over plain loop: 0.60, at most 0.65: holds" in said


def test_a_quick_run_judges_nothing():
    said = table({"a": {"1": {**A["1"], "quick": True}}})
    assert "at most" not in said
    assert "The figures say nothing." in said


@pytest.mark.parametrize(("time", "said"), [(2.5, "2.50 s"), (0.0123, "12.3 ms"), (4.2e-5, "42 µs")])
def test_times_have_a_unit_that_suits_them(time, said):
    assert seconds(time) == said


def test_the_picture_is_drawn(tmp_path):
    file = tmp_path / "all.png"
    plot({"a": A, "f": F, "g": G}, file)
    assert file.read_bytes().startswith(b"\x89PNG")


def tables():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_readme_and_docs_are_those_that_the_committed_results_give():
    module = tables()
    committed = module.results()
    for page in module.PAGES:
        text = page.read_text()
        assert module.PLACE.search(text)
        assert module.with_tables(text, committed) == text, f"{page.name}: run python benchmarks/tables.py"


def test_other_results_give_other_tables():
    """The negative control of the above."""
    module = tables()
    committed = module.results()
    other = json.loads(json.dumps(committed))
    other["f"]["1"]["contenders"][OURS]["ratio"] *= 2
    assert module.with_tables(module.PAGES[0].read_text(), other) != module.PAGES[0].read_text()


def test_what_is_committed_is_complete():
    committed = tables().results()
    assert committed
    for name, settings in committed.items():
        assert set(settings) <= {setting.name for setting in CASES[name].settings}
        for found in settings.values():
            assert not found["quick"]
            assert {"date", "machine", "versions", "limits"} <= set(found)
            assert set(found["contenders"]) | set(found["left_out"]) == set(CASES[name].contenders)
            for timed in found["contenders"].values():
                assert timed["difference"] <= SAME
                assert len(timed["all_seconds"]) >= 5
