"""The kernel that rotates queries and keys of towers, in Triton's interpreter, against its specification."""

import pytest
import torch

from nanoinfer.ops.rotary import spec

pytest.importorskip("triton")

from nanoinfer.ops.rotary import triton as kernels

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here")


@pytest.mark.parametrize(("num_heads", "head_dim"), [(2, 16), (3, 72), (1, 80)])
def test_the_halves_of_heads_are_rotated_as_specified(num_heads: int, head_dim: int) -> None:
    """Queries and keys are views of what one product made for queries, keys and values, which stay."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, 3, num_heads, head_dim, generator=generator)
    cos, sin = torch.randn(2, 5, head_dim, generator=generator)
    expected = qkv.clone()
    spec.rotate_halves.__wrapped__(expected[:, 0], expected[:, 1], cos, sin)
    kernels.rotate_halves(qkv[:, 0], qkv[:, 1], cos, sin)
    assert not torch.equal(expected[:, 0], expected[:, 1])
    torch.testing.assert_close(qkv, expected)
    kernels.rotate_halves(qkv[:0, 0], qkv[:0, 1], cos[:0], sin[:0])
