"""The kernel that rotates queries and keys of towers, in Triton's interpreter, against its specification."""

import pytest
import torch

from nanoinfer.ops.rotary import spec

pytest.importorskip("triton")

from nanoinfer.ops.rotary import triton as kernels

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here")


@pytest.mark.parametrize(("num_heads", "head_dim"), [(2, 16), (3, 72), (1, 80)])
def test_the_halves_of_heads_are_rotated_as_specified(num_heads: int, head_dim: int) -> None:
    """The queries are a view of what one product made for queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    q, k, _ = torch.randn(5, 3, num_heads, head_dim, generator=generator).unbind(1)
    cos, sin = torch.randn(2, 5, head_dim, generator=generator)
    for x in (q, k):
        found = kernels.rotate_halves(x, cos, sin)
        assert found.is_contiguous()
        torch.testing.assert_close(found, spec.rotate_halves.__wrapped__(x, cos, sin))
    assert kernels.rotate_halves(q[:0], cos[:0], sin[:0]).shape == (0, num_heads, head_dim)
