"""The report in a real browser, at the widths of a phone and of a desk, light and dark."""

import json
import re
import shutil
import subprocess
from html import escape, unescape

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

LOOK = """
<script>
onload = () => {
  const seen = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument.documentElement;
    return {
      width: frame.contentWindow.innerWidth,
      needs: page.scrollWidth,
      background: frame.contentWindow.getComputedStyle(page.querySelector("body")).backgroundColor,
      smallest: Math.min(...[...page.querySelectorAll("text")].map(text => text.getBoundingClientRect().height)),
    };
  });
  document.body.innerHTML = "<pre id=seen></pre>";
  document.getElementById("seen").textContent = JSON.stringify(seen);
};
</script>
"""


@pytest.fixture
def shown(tmp_path):
    """What the browser says of a page in each width and colour scheme, and in its console."""

    def show(page):
        frames = "".join(
            f'<iframe style="width: {width}px; height: 800px; border: 0; color-scheme: {scheme}" srcdoc="{escape(page)}"></iframe>'
            for width in (390, 1280)
            for scheme in ("light", "dark")
        )
        (tmp_path / "look.html").write_text(f"<!doctype html><body>{frames}{LOOK}")
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--user-data-dir={tmp_path}/user",
        ]
        ran = subprocess.run(
            [CHROMIUM, *options, "--virtual-time-budget=5000", "--dump-dom", f"file://{tmp_path}/look.html"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        (seen,) = re.findall(r'<pre id="seen">(.*?)</pre>', ran.stdout)
        return json.loads(unescape(seen)), re.findall(r".*CONSOLE.*", ran.stderr)

    return show


pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


def test_the_report_fits_a_phone_and_a_desk_in_light_and_dark_without_an_error(train, shown):
    seen, console = shown((train("--compare").folder / "report.html").read_text())
    assert console == []
    assert [page["width"] for page in seen] == [390, 390, 1280, 1280]
    assert all(page["needs"] <= page["width"] for page in seen)
    assert [page["background"] for page in seen] == ["rgb(251, 250, 248)", "rgb(20, 22, 26)"] * 2
    assert all(page["smallest"] > 10 for page in seen)


def test_a_page_that_is_too_wide_or_goes_wrong_is_noticed(shown):
    """The control."""
    seen, console = shown('<body><div style="width: 500px">wide</div><script>console.error("wrong")</script>')
    assert [page["needs"] > page["width"] for page in seen] == [True, True, False, False]
    assert any("wrong" in line for line in console)
