"""`check` says of each loss why its split is not exact, and of sound ones nothing."""

import pytest
from broken import CASES

from wholebatch.torch import check


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_cause_is_told(case):
    report = check(*case.make())
    print(report)
    assert report.cause == case.cause
    assert report.exact == (case.cause in (None, "rounding"))
