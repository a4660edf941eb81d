"""Every Python example in README and docs runs, page by page, in the order in which it is read."""

import re

import pages
import pytest
import torch
from draw import FIGURES, FOLDER, draw


def name_of(page):
    return str(page.relative_to(pages.ROOT))


@pytest.mark.parametrize("page", pages.PAGES, ids=name_of)
def test_examples_run_and_figures_are_drawn_from_them(page, tmp_path):
    torch.manual_seed(0)
    computed = pages.run(page)
    if page.stem in FIGURES and page.parent.name == "ideas":
        assert "</svg>" in draw(page.stem, computed, tmp_path).read_text()


def test_most_pages_have_examples():
    assert sum(bool(pages.EXAMPLE.search(page.read_text())) for page in pages.PAGES) >= 3


@pytest.mark.parametrize("page", pages.PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_page_can_be_reached_from_the_readme():
    reached, ahead = set(), [pages.PAGES[0]]
    while ahead:
        page = ahead.pop()
        reached.add(page)
        links = {(page.parent / link).resolve() for link in re.findall(r"\]\(([^)#:]+\.md)\)", page.read_text())}
        ahead += links - reached
    assert {name_of(page) for page in pages.PAGES} - {name_of(page) for page in reached} == set()


def test_every_figure_is_small_readable_on_any_background_and_shown_by_its_page():
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(FIGURES)
    for name in FIGURES:
        figure, page = FOLDER / f"{name}.svg", pages.ROOT / "docs" / "ideas" / f"{name}.md"
        assert figure.stat().st_size < 60_000
        assert "fill: #ffffff" in figure.read_text().partition("</path>")[0][:4000], "it paints its own background"
        assert f"](../figures/{name}.svg)" in page.read_text()
