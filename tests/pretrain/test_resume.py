"""A run that was cut short ends with the same bits as one that was not."""

import json
import os
import shutil
import signal

import pytest
import torch
from kills import readable
from tiny import STEPS, TINY, everything, newest, records, write_text

from wholebatch import cli
from wholebatch.pretrain import files, loop
from wholebatch.pretrain.torch_model import GPT


class Killed(BaseException):
    """As `kill -9`, nothing catches it; but the test goes on."""


@pytest.fixture
def at_step(monkeypatch):
    """Do something at the beginning of a step."""

    def put(step, does):
        real = loop.learning_rate

        def watched(settings, n):
            if n == step:
                does()
            return real(settings, n)

        monkeypatch.setattr(loop, "learning_rate", watched)

    return put


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that is done, to be copied."""
    place = tmp_path_factory.mktemp("finished")
    options = [
        *TINY,
        *STEPS,
        "--data",
        write_text(place / "text.txt"),
        "--cache",
        place / "cache",
        "--out",
        place / "run",
    ]
    assert cli.run(["train", *map(str, options)]) == 0
    return place


def die():
    raise Killed


@pytest.mark.parametrize(
    ("step", "options"),
    [(1, []), (2, []), (3, []), (6, []), (4, ["--dropout", "0.3"]), (4, ["--precision", "fp16"])],
    ids=lambda given: " ".join(given) or "plain" if isinstance(given, list) else f"step {given}",
)
def test_weights_and_optimizer_are_the_same_to_the_bit(train, at_step, step, options, monkeypatch):
    whole = train(*options, out="whole").folder
    at_step(step, die)
    with pytest.raises(Killed):
        train(*options)
    monkeypatch.undo()
    ran = train("--resume", tiny=False)
    assert ran.code == 0, ran.error
    assert everything(ran.folder) == everything(whole)
    assert [(r["step"], r["loss"]) for r in records(ran.folder)] == [(r["step"], r["loss"]) for r in records(whole)]
    assert "files are as they were written" in train("--resume", tiny=False).out


@pytest.fixture
def scarce(monkeypatch):
    """Memory for two rows at a time only, once that is put in here."""
    real, since = GPT.forward, []

    def forward(self, ids):
        if since and self.training and len(ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(self, ids)

    monkeypatch.setattr(GPT, "forward", forward)
    return since


AUTO = ["--micro-batch-size", "auto", "--checkpoint-every", 4]


@pytest.mark.parametrize("options", [[], ["--dropout", 0.3], ["--precision", "fp16"]], ids=["plain", "dropout", "fp16"])
def test_where_memory_runs_out_pieces_are_halved_and_stay_so_when_the_run_goes_on(
    train, at_step, scarce, options, monkeypatch
):
    """The last bits depend on how a batch is cut, and memory may not run out again where it did."""
    plenty = train(*AUTO, *options, out="plenty").folder
    at_step(3, lambda: scarce.append(True))
    ran = train(*AUTO, *options, out="whole")
    whole = ran.folder
    assert [record["micro_batch_size"] for record in records(whole)] == [5, 5, 2, 2, 2, 2]
    assert ran.error == "wholebatch: memory ran out in step 3: 2 rows at a time from here on"
    scarce.clear()
    at_step(4, die)
    with pytest.raises(Killed):
        train(*AUTO, *options)
    monkeypatch.undo()
    ran = train("--resume", tiny=False)
    assert ran.code == 0, ran.error
    assert "after step 3 of 6" in ran.out
    assert "5 rows, 2 in memory at a time" in ran.out
    assert json.loads((ran.folder / "summary.json").read_text())["micro_batch_size"] == 2
    assert ">5 rows, 2 at a time<" in (ran.folder / "report.html").read_text()
    assert everything(ran.folder) == everything(whole) != everything(plenty)


def test_a_size_that_was_asked_for_is_not_halved(train, at_step, scarce):
    at_step(3, lambda: scarce.append(True))
    ran = train("--micro-batch-size", 4)
    assert (ran.code, ran.error) == (3, "wholebatch: OutOfMemoryError: CUDA out of memory.")
    assert newest(ran.folder).name == "step-000002"


def test_another_seed_is_another_run(train):
    """The control of the comparison above."""
    assert everything(train(out="a").folder) != everything(train("--seed", 1, out="b").folder)


def test_metrics_of_lost_steps_are_cut_off(train, at_step, monkeypatch, tmp_path):
    folder = tmp_path / "run"
    at_step(4, die)
    with pytest.raises(Killed):
        train()
    assert [record["step"] for record in records(folder)] == [1, 2, 3]
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 4, "lo')
    monkeypatch.undo()
    train("--resume", tiny=False)
    assert [record["step"] for record in records(folder)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("runs_before", [0, 1], ids=["saved", "replaced"])
def test_a_kill_while_old_checkpoints_are_removed_leaves_none_half_there(train, tmp_path, monkeypatch, runs_before):
    def half_gone(path, **_):
        if path.exists():
            (path / "weights.safetensors").unlink()
            raise Killed

    for _ in range(runs_before):
        train()
    monkeypatch.setattr(files.shutil, "rmtree", half_gone)
    with pytest.raises(Killed):
        train("--overwrite")
    readable(tmp_path / "run")
    monkeypatch.undo()
    assert train("--overwrite").code == 0
    readable(tmp_path / "run")


def test_without_anything_saved_resume_begins(train):
    ran = train("--resume")
    assert ran.code == 0
    assert everything(ran.folder) == everything(train(out="other").folder)


def test_a_run_that_is_done_is_verified(train):
    train()
    ran = train("--resume", tiny=False)
    assert ran.code == 0
    assert "all 10 files are as they were written" in ran.out  # three in each of two checkpoints


OF_A_RUN = ["metrics.jsonl", "report.html", "summary.json", "tokenizer.json", "SHA256SUMS"]


@pytest.mark.parametrize("file", [*OF_A_RUN, "checkpoints/step-000004/state.json"])
def test_a_run_that_is_done_and_changed_is_told(train, finished, tmp_path, file):
    shutil.copytree(finished / "run", tmp_path / "run")
    changed = tmp_path / "run" / file
    changed.write_text(changed.read_text() + " ")
    ran = train("--resume", tiny=False)
    assert ran.code == 3
    assert ran.error == f"wholebatch: {changed} is not as it was written: its checksum differs"


def truncated(path):
    path.write_bytes(path.read_bytes()[:-10])


def edited(path):
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["weights.safetensors", "optimizer.safetensors", "state.json", "SHA256SUMS"])
@pytest.mark.parametrize("damage", [truncated, edited, os.remove], ids=["truncated", "edited", "gone"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(train, finished, tmp_path, file, damage):
    shutil.copytree(finished / "run", tmp_path / "run")
    path = newest(tmp_path / "run")
    damage(path / file)
    ran = train("--resume", tiny=False)
    assert ran.code == 0
    assert ran.error.startswith(f"wholebatch: {path}/")
    assert "is damaged" in ran.error
    assert ran.error.endswith("using the checkpoint before it")
    assert "after step 4" in ran.out
    assert everything(ran.folder) == everything(finished / "run")


def test_where_no_sound_checkpoint_is_left_the_run_ends(train):
    for path in (train().folder / "checkpoints").iterdir():
        truncated(path / "weights.safetensors")
    ran = train("--resume", tiny=False)
    assert ran.code == 3
    assert "no checkpoint is left" in ran.error


def test_another_configuration_is_refused_with_what_differs(train):
    train()
    ran = train("--resume", "--width", 16, "--seed", 3, tiny=False)
    assert ran.code == 2
    assert "--width was 8 and is 16; --seed was 0 and is 3" in ran.error


def test_another_text_is_refused(train, text):
    train(steps=[*STEPS[2:], "--steps", "4"])
    shutil.rmtree(newest(text.parent / "run"))  # so that it is not done
    text.write_text(text.read_text() + "more")
    ran = train("--resume", tiny=False)
    assert ran.code == 2
    assert "--data is not the text that the run" in ran.error


def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(train, at_step, monkeypatch):
    whole = train(out="whole").folder
    at_step(3, lambda: os.kill(os.getpid(), signal.SIGINT))
    ran = train()
    assert ran.code == 130
    assert "step 3 is saved" in ran.out
    assert f"wholebatch train --out {ran.folder} --cache {ran.folder.parent / 'cache'} --resume" in ran.out
    monkeypatch.undo()
    assert everything(train("--resume", tiny=False).folder) == everything(whole)


def test_a_second_ctrl_c_is_not_waited_for(train, at_step):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    at_step(3, twice)
    ran = train()
    assert (ran.code, ran.error) == (130, "wholebatch: interrupted")
    assert newest(ran.folder).name == "step-000002"


def test_a_program_is_told_how_to_go_on(train, at_step):
    at_step(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    ran = train("--json")
    assert ran.code == 130
    assert json.loads(ran.out)["step"] == 3
