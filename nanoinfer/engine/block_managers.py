"""Chooses the block manager of a model, by what its layers remember."""

from nanoinfer.config import EngineConfig
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.hybrid_blocks import HybridBlockManager
from nanoinfer.engine.interfaces import Runner
from nanoinfer.engine.windowed_blocks import WindowedBlockManager


def make_block_manager(config: EngineConfig, runner: Runner) -> BlockManager:
    """Return what gives out the blocks of a runner's cache."""
    sizes = runner.num_blocks, config.kvcache_block_size
    if runner.num_snapshots > 0:
        return HybridBlockManager(*sizes, runner.max_num_seqs, runner.num_snapshots)
    if runner.window is None:
        return BlockManager(*sizes, config.enable_prefix_caching)
    return WindowedBlockManager(
        *sizes,
        config.enable_prefix_caching,
        window=runner.window,
        num_windowed_groups=runner.num_windowed_groups,
        max_chunk_tokens=config.max_num_batched_tokens,
        num_rows=runner.max_num_seqs + 1,
    )
