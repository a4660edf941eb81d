"""One number per piece, on the host or on a device, in any mixture."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wholebatch.torch._series import Series

NUMBERS = st.one_of(st.integers(0, 1000), st.floats(0, 1000, width=16))


@given(
    entries=st.lists(st.tuples(NUMBERS, st.booleans()), min_size=1, max_size=70),
    expected=st.one_of(st.none(), st.integers(1, 40)),
)
def test_a_series_is_the_list_of_its_entries(entries, expected):
    series = Series(expected)
    for number, on_device in entries:
        series.append(torch.tensor(number) if on_device else number)
    plain = [number for number, _ in entries]
    assert float(series.sum()) == pytest.approx(sum(plain), rel=1e-6)
    if any(on_device for _, on_device in entries):
        assert series.on_device().tolist() == pytest.approx(plain, rel=1e-6)
    else:
        assert series.on_device() is None
        assert series.sum() == sum(plain)


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.bool, torch.int64),
        (torch.uint8, torch.int64),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_entries_are_kept_in_at_least_32_bits(dtype, kept):
    series = Series(None)
    series.append(torch.tensor(1, dtype=dtype))
    assert series.on_device().dtype == kept
