"""For tests on a GPU, which may run in several processes side by side. Without one, each file is one skipped item."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


class SkippedModule(pytest.Module):
    """Stands for a file of tests that are not even imported, since there are thousands of them."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip("needs a CUDA GPU", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if torch.cuda.is_available() else SkippedModule.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True)
def memory_for_others() -> Iterator[None]:
    """PyTorch keeps what a test has freed, and another process cannot have it."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()
