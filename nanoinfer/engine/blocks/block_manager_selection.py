"""Chooses the block manager of a model, by what its layers remember."""

from nanoinfer.config import EngineConfig
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.blocks.hybrid_blocks import HybridBlockManager
from nanoinfer.engine.blocks.windowed_blocks import WindowedBlockManager
from nanoinfer.engine.interfaces import RunnerLimits


def make_block_manager(config: EngineConfig, limits: RunnerLimits) -> BlockManager:
    """Return what gives out the blocks of a runner's cache."""
    sizes = limits.num_blocks, config.kvcache_block_size
    if limits.num_snapshots > 0:
        return HybridBlockManager(*sizes, limits.max_num_seqs, limits.num_snapshots)
    if limits.window is None:
        return BlockManager(*sizes, config.enable_prefix_caching)
    return WindowedBlockManager(
        *sizes,
        config.enable_prefix_caching,
        window=limits.window,
        num_windowed_groups=limits.num_windowed_groups,
        max_chunk_tokens=config.max_num_batched_tokens,
        num_rows=limits.max_num_seqs + 1,
    )
