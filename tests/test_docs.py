"""The page that shows every way to call prints what it says it prints."""

import doctest
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_of_ways_to_call_prints_what_it_shows() -> None:
    results = doctest.testfile(str(DOCS / "generate.md"), module_relative=False)
    assert results.attempted > 30
    assert results.failed == 0
