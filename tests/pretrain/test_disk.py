"""A disk that is full, and files that cannot be written."""

import errno
import resource

import pytest
from tiny import everything, newest

from wholebatch.pretrain import checkpoints


def test_a_full_disk_ends_the_run_and_leaves_the_old_checkpoint(train, monkeypatch):
    whole = train(out="whole").folder
    real = checkpoints.save_file

    def save(arrays, path):
        if "step-000004" in str(path):
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(arrays, path)

    monkeypatch.setattr(checkpoints, "save_file", save)
    ran = train()
    assert ran.code == 3
    assert ran.error.startswith(f"wholebatch: the disk is full: cannot write {ran.folder}/checkpoints/step-000004")
    assert sorted(path.name for path in (ran.folder / "checkpoints").iterdir()) == ["step-000000", "step-000002"]
    monkeypatch.undo()
    assert everything(train("--resume", tiny=False).folder) == everything(whole)


def test_the_system_itself_refuses_a_large_file(train):
    size = (newest(train().folder) / "optimizer.safetensors").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 100, hard))
    try:
        ran = train(out="other")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ran.code == 3
    assert ran.error == f"wholebatch: the disk is full: cannot write {ran.folder}/checkpoints/step-000002"


def test_metrics_are_cut_back_to_whole_lines(tmp_path, monkeypatch):
    from wholebatch.pretrain import metrics
    from wholebatch.pretrain.errors import DiskError

    written = metrics.Metrics(tmp_path / "metrics.jsonl", 0)
    written.append({"step": 1})
    real = metrics.os.write

    def half(file, line):
        real(file, line[:4])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(metrics.os, "write", half)
    with pytest.raises(DiskError, match="the disk is full"):
        written.append({"step": 2})
    written.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
