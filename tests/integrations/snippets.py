"""The snippets of docs/integrations.md."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


def snippet(title: str) -> str:
    """Return the Python of a section."""
    [section] = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    [source] = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return str(source)
