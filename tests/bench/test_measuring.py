"""How contenders are compared: the check before timing, turns, ratios, peaks."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from wholebatch import OptionError, WholeBatchError
from wholebatch.bench import CASES, _run, _turns, measure, missing, select
from wholebatch.bench._case import OURS, UNSPLIT, Case, Setting
from wholebatch.bench._worker import work


def job(case: Case, setting: Setting, **what):
    options = {**setting.options, **case.quick}
    if case.front_end == "jax":
        options["rows"] = 8  # fewer pieces to compile where they are unrolled
    common = {"front_end": case.front_end, "problem": case.problem, "options": options}
    return {**common, "size": setting.micro_batch_size, "threads": 1, "rounds": 2, "repeats": 1, **what}


@pytest.mark.filterwarnings("ignore")  # what the peers themselves warn of
@pytest.mark.parametrize("name", CASES)
def test_all_who_are_timed_compute_the_same(in_this_process, name):
    case = CASES[name]
    setting = case.settings[min(1, len(case.settings) - 1)]
    names = [contender for contender in case.contenders if contender != "mean of means"]
    found = work(job(case, setting, do="check", names=names))
    assert set(found) == set(names)
    assert max(found.values()) < 1e-6


def test_who_computes_something_else_is_not_timed(in_this_process):
    """The mean of the pieces' means, where pieces hold different numbers of tokens."""
    case = replace(CASES["e"], contenders=("plain loop", "mean of means", OURS))
    *_, (_, record) = measure(case, replace(case.settings[0], peaks=False), quick=True)
    assert set(record["contenders"]) == {"plain loop", OURS}
    assert record["left_out"]["mean of means"].startswith("computes something else: weights are off by")
    assert all(len(found["all_seconds"]) == 5 for found in record["contenders"].values())
    assert record["contenders"]["plain loop"]["ratio"] == 1
    assert record["work"]["operations"] > 0
    assert record["limits"]["bytes"] > 0


def test_nothing_is_timed_where_ours_computes_something_else(monkeypatch):
    answers = {"check": {"plain loop": 1e-16, OURS: 0.1}}
    monkeypatch.setattr(_run, "_run", lambda job: answers[job["do"]])
    *_, (doing, record) = measure(CASES["g"], CASES["g"].settings[0])
    assert doing.startswith("checking")
    assert record["contenders"] == {}
    assert record["left_out"] == {OURS: "computes something else: weights are off by 1e-01 of their change"}


class Clock:
    """Of a machine on which everything takes as long as is said, and twice that from the third round on."""

    def __init__(self, costs):
        self.costs, self.now, self.turns = costs, 0.0, []

    def batches(self, count):
        return list(range(count))

    def contender(self, name):
        return Contender(self, name)


class Contender:
    facts = {}  # noqa: RUF012

    def __init__(self, clock, name):
        self.clock, self.name = clock, name

    def step(self, batch):
        self.clock.turns.append((self.name, batch))
        slower = 2 if len(self.clock.turns) > len(self.clock.costs) * 4 else 1
        self.clock.now += self.clock.costs[self.name] * slower


def test_contenders_take_turns_and_a_slow_phase_of_the_machine_cancels(monkeypatch):
    clock = Clock({"plain loop": 2.0, OURS: 1.0})
    monkeypatch.setattr(_turns.time, "perf_counter", lambda: clock.now)
    found = _turns.take_turns(clock, ["plain loop", OURS], rounds=5, repeats=1)
    assert found[OURS]["ratio"] == 0.5
    assert found[OURS]["ratio_quartiles"] == [0.5, 0.5]
    assert found[OURS]["seconds"] == 1.0
    timed = clock.turns[2:]
    assert [name for name, _ in timed[:4]] == ["plain loop", OURS, OURS, "plain loop"]  # who starts moves on
    assert [batch for _, batch in timed] == [0, 0, 1, 1, 2, 2, 3, 3, 0, 0]


def test_a_ratio_is_that_of_the_best_times():
    found = _turns.summary(np.array([1.5, 2.0, 30.0]), np.array([10.0, 1.0, 10.0]))
    assert found["ratio"] == 1.5
    assert found["ratio_quartiles"] == [pytest.approx(1.075), 2.5]


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="peaks are read from Linux's /proc")
def test_the_peak_is_that_of_the_largest_piece():
    asked = {**job(CASES["g"], CASES["g"].settings[-1], do="peak"), "options": {"rows": 8 * 1024}}
    program = f"""if True:
        from wholebatch.bench._worker import work
        print([work({asked} | {{"names": [name]}}) for name in ("{OURS}", "{UNSPLIT}")])"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    ours, unsplit = json.loads(said)
    activations = 8 * 1024 * 256 * 4 * 12  # two layers, six times
    assert unsplit > 0.8 * activations
    assert ours < 0.4 * activations


def test_a_measurement_that_fails_says_who_and_why():
    asked = job(CASES["a"], CASES["a"].settings[0], do="check", names=["plain loop"])
    with pytest.raises(WholeBatchError, match=r"check of gpt \(plain loop\): ModuleNotFoundError: No module named"):
        _run._run({**asked, "front_end": "abacus"})


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (["a/4"], ["a/4"]),
        (["c", "c/gpt"], ["c/gpt", "c/layers"]),
        ([], [f"{name}/{setting.name}" for name, case in CASES.items() for setting in case.settings]),
    ],
    ids=["a setting", "a case, once", "all"],
)
def test_cases_and_settings_are_chosen_by_name(wanted, found):
    assert [f"{name}/{setting.name}" for name, setting in select(wanted)] == found


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("z", "there is no case 'z': known are a, b, c, d, e, f, g"),
        ("f/3", "there is no case 'f/3': known are f/1, f/4"),
    ],
)
def test_an_unknown_case_is_answered_with_the_known_ones(wanted, said):
    with pytest.raises(OptionError, match=said):
        select([wanted])


def test_who_is_not_installed_is_left_out_and_named(monkeypatch):
    installed = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lightning" else installed(name))
    assert missing(CASES["a"]) == {"Fabric": "lightning is not installed"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert missing(CASES["f"])[OURS] == "jax is not installed"


def test_every_case_compares_ours_with_a_baseline_over_at_least_five_rounds():
    for case in CASES.values():
        assert case.contenders[0] != OURS
        assert OURS in case.contenders
        assert all(setting.rounds >= 5 for setting in case.settings)
        assert all(over in case.contenders or over in {s.name for s in case.settings} for over in overs(case))


def overs(case):
    return [target.over for target in case.targets]


def test_a_worker_prints_json_and_loads_one_front_end():
    case, setting = CASES["g"], CASES["g"].settings[1]
    asked = json.dumps(job(case, setting, do="check", names=["plain loop"]))
    program = (
        "import sys, runpy; sys.argv[1:] = [sys.stdin.read()];"
        "runpy.run_module('wholebatch.bench._worker', run_name='__main__'); assert 'jax' not in sys.modules"
    )
    said = subprocess.run([sys.executable, "-c", program], input=asked, capture_output=True, text=True, check=True)
    assert json.loads(said.stdout)["plain loop"] < 1e-12
