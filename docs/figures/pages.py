"""Pages whose Python examples can be run: what they say is what they compute."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def run(page: Path) -> dict[str, Any]:
    """Run a page's examples in the order in which they are read, and return the names that they leave."""
    namespace: dict[str, Any] = {"__name__": page.stem}
    text = page.read_text()
    for example in EXAMPLE.finditer(text):
        line = text.count("\n", 0, example.start(1))
        exec(compile("\n" * line + example[1], page.name, "exec"), namespace)
    return namespace
