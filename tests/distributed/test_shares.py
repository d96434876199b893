"""Which part of a weight each rank holds, where shares are whole groups of values that have one scale."""

import pytest
import torch

from nanoinfer.distributed.tensor_parallel import TensorParallel


@pytest.mark.parametrize(
    ("total", "size", "shares"),
    [
        (1408, 2, [768, 640]),  # GLM-4.5-Air's experts
        (768, 4, [256, 256, 256, 0]),
        (1024, 2, [512, 512]),
        (200, 2, [128, 72]),  # the last group is shorter
        (200, 1, [200]),
    ],
)
def test_shares_of_whole_groups_are_filled_up_with_zeros(total: int, size: int, shares: list[int]) -> None:
    weight, scales = torch.arange(1, 2 * total + 1).view(2, total), torch.arange(1.0, -(-total // 128) + 1)
    ranks = [TensorParallel(rank, size, share_multiple=128) for rank in range(size)]
    length = ranks[0].shard_size(total, "values")
    assert size == 1 or length % 128 == 0
    parts = [rank.shard(weight, 1) for rank in ranks]
    assert all(part.shape == (2, length) for part in parts)
    assert [int((part[0] != 0).sum()) for part in parts] == shares
    whole = torch.cat(parts, 1)
    assert torch.equal(whole[:, :total], weight)
    assert not whole[:, total:].any()
    of_groups = torch.cat([rank.shard(scales, 0, values_per_entry=128) for rank in ranks])
    assert torch.equal(of_groups[: len(scales)], scales)
    assert not of_groups[len(scales) :].any()
    assert len(of_groups) == size * -(-length // 128)
