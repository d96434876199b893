"""docs/promises.md names tests that there are."""

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_test_that_the_promises_name_is_where_they_say() -> None:
    text = (TESTS.parent / "docs" / "promises.md").read_text()
    named = 0
    for line in text.splitlines():
        source = ""
        for module, test in re.findall(r"((?:\w+/)?test_\w+): |\b(test_\w+)", line):
            if module:
                source = (TESTS / f"{module}.py").read_text()
            else:
                assert f"def {test}(" in source, f"{test} is not in the module that {line!r} names"
                named += 1
    assert named > 60
