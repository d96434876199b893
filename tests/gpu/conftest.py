"""For tests on a GPU, which may run in several processes side by side."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def memory_for_others() -> Iterator[None]:
    """PyTorch keeps what a test has freed, and another process cannot have it."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()
