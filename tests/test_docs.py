"""Every Python example in README and docs runs, page by page, in the order in which it is read."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page):
    torch.manual_seed(0)
    namespace = {"__name__": page.stem}
    text = page.read_text()
    for example in EXAMPLE.finditer(text):
        line = text.count("\n", 0, example.start(1))
        exec(compile("\n" * line + example[1], page.name, "exec"), namespace)


def test_most_pages_have_examples():
    assert sum(bool(EXAMPLE.search(page.read_text())) for page in PAGES) >= 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
