"""`wholebatch train`, from data to report."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny import newest, records


def test_a_run_says_what_it_did_and_where_its_files_are(train):
    ran = train()
    assert ran.code == 0, ran.error
    for words in ("5 rows, 2 in memory at a time", "the whole batch would have needed", "before", "after", "float64"):
        assert words in ran.out
    for file in ("metrics.jsonl", "report.html", "checkpoints/step-000006"):
        assert str(ran.folder / file) in ran.out
        assert (ran.folder / file).exists()


def test_the_loss_falls(train):
    ran = train(steps=["--steps", 60, "--lr", 0.01])
    summary = json.loads((ran.folder / "summary.json").read_text())
    assert summary["loss_after"] < summary["loss_before"] - 1
    assert summary["exactness"]["exact"]


def test_metrics_hold_one_object_per_step_and_validations_within(train):
    metrics = records(train().folder)
    assert [record["step"] for record in metrics] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in metrics if "validation_loss" in record] == [3, 6]
    assert all(record["loss"] > 0 and record["grad_norm"] > 0 for record in metrics)
    assert metrics[-1]["tokens"] == 6 * 5 * 8


def test_programs_get_one_object(train):
    ran = train("--json")
    said = json.loads(ran.out)
    assert said["how"] == "done"
    assert said["step"] == 6
    assert "step 6/6" in ran.error


def test_the_last_few_checkpoints_are_kept(train):
    folder = train("--keep", 3).folder
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step-000002",
        "step-000004",
        "step-000006",
    ]


def test_a_checkpoint_is_arrays_and_json(train):
    checkpoint = newest(train().folder)
    weights, moments = (load_file(checkpoint / f"{name}.safetensors") for name in ("weights", "optimizer"))
    assert {f"{kind}.{name}" for kind in ("first", "second") for name in weights} == moments.keys()
    assert json.loads((checkpoint / "state.json").read_text())["step"] == 6


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp64"])
def test_precisions_agree_as_far_as_they_go(train, precision):
    expected, got = (records(train("--precision", p, out=p).folder)[-1]["loss"] for p in ("fp32", precision))
    assert got == pytest.approx(expected, abs=1e-6 if precision == "fp64" else 0.02)


def test_the_micro_batch_does_not_matter(train):
    """The last size is the control: another batch is another run."""
    folders = [
        train("--precision", "fp64", "--micro-batch-size", 3, out="three").folder,
        train("--precision", "fp64", out="two").folder,
        train("--precision", "fp64", "--batch-size", 4, out="other").folder,
    ]
    whole, split, other = (load_file(newest(folder) / "weights.safetensors") for folder in folders)
    assert max(np.abs(whole[name] - split[name]).max() for name in whole) < 1e-10
    assert max(np.abs(whole[name] - other[name]).max() for name in whole) > 1e-5


def test_the_learning_rate_warms_up_and_decays_over_optimizer_steps(train):
    ran = train("--lr", 1e-3, "--lr-rule", "sqrt", "--base-batch-size", 20, "--warmup", 2)
    rates = [record["learning_rate"] for record in records(ran.folder)]
    assert rates[:2] == pytest.approx([0.25e-3, 0.5e-3])
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert rates[-1] == pytest.approx(0.05e-3)


def test_tokens_in_place_of_steps(train):
    ran = train("--tokens", 100, steps=[])
    assert len(records(ran.folder)) == 3  # of 40 tokens each


def test_without_data_the_standard_library_is_the_text(train, monkeypatch):
    monkeypatch.setattr("wholebatch.pretrain.text._standard_library", lambda: [__import__("pathlib").Path(__file__)])
    ran = train(data=None)
    assert ran.code == 0
    assert "the source of Python's standard library" in ran.out
