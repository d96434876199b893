"""Whole engines whose layers remember different tokens, compared with the same layers over one block table."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from nanoinfer import LLM, SamplingParams
from nanoinfer.caches import cache_groups
from nanoinfer.caches.cache_groups import CacheGroups
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.cache_groups.specs import CacheGroupSpec, FullAttentionSpec, RecurrentStateSpec, SlidingWindowSpec
from nanoinfer.errors import ConfigError
from nanoinfer.models.llama import LlamaForCausalLM
from nanoinfer.models.qwen import Qwen3MoeForCausalLM
from nanoinfer.models.qwen3_next import Qwen3NextForCausalLM
from tests.caches.test_cache_groups import random_layers
from tests.models.test_architectures import checkpoint, draw_prompts

__all__ = ["checkpoint"]
FULL, WIDE, NARROW = FullAttentionSpec(), SlidingWindowSpec(20), SlidingWindowSpec(7)
STATES = RecurrentStateSpec(16)
LINEAR, ATTENTION = "linear_attention", "full_attention"
PARAMS = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)


@pytest.mark.parametrize(
    ("windows", "layer_types", "groups"),
    [
        ((20, None, 7), None, (FULL, WIDE, NARROW)),
        ((20, None, 20, 7, 20, 7), None, (FULL, SlidingWindowSpec(20, 3), SlidingWindowSpec(7, 2))),
        ((20, 7, 20), None, (SlidingWindowSpec(20, 2), NARROW)),
        ((None, 7, 7, None), [LINEAR, ATTENTION, ATTENTION, ATTENTION], (FULL, SlidingWindowSpec(7, 2), STATES)),
        ((20, 7, None, 7), [LINEAR, ATTENTION, LINEAR, ATTENTION], (FULL, STATES)),
        ((7, 20, None, 7), [ATTENTION, ATTENTION, LINEAR, LINEAR], (WIDE, NARROW, STATES)),
    ],
)
def test_any_mix_of_groups_gives_the_tokens_of_one_table(
    checkpoint: Callable[..., Path],
    windows: tuple[int | None, ...],
    layer_types: list[str] | None,
    groups: tuple[CacheGroupSpec, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Qwen3NextForCausalLM if layer_types else LlamaForCausalLM
    layers = {"num_hidden_layers": len(windows)} | ({"layer_types": layer_types} if layer_types else {})
    folder = checkpoint(model.__name__, 3, **layers)
    monkeypatch.setattr(model, "config_readers", {**model.config_readers, "windows": lambda _fields: windows})
    shared, *tails = draw_prompts(3, (70, 3, 20, 40, 90))
    prompts = [*(shared + tail for tail in tails), shared]
    options = {"device": "cpu", "dtype": "float32", "kvcache_block_size": 16, "max_num_seqs": 4, "max_model_len": 200}
    with LLM(folder, num_kvcache_blocks=14, max_num_batched_tokens=64, **options) as llm:
        assert llm.engine.runner.limits.cache_specs == groups
        first = llm.generate(prompts, PARAMS, use_tqdm=False)
        again = llm.generate(prompts, PARAMS, use_tqdm=False)
        assert llm.get_metrics().num_used_blocks == 0
    monkeypatch.setattr(cache_groups, "MAX_TABLES", 1)
    with LLM(folder, enable_prefix_caching=False, **options) as llm:
        assert not any(isinstance(group, SlidingWindowSpec) for group in llm.engine.runner.limits.cache_specs)
        expected = [output.token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)]
    for outputs in (first, again):
        assert [output.token_ids for output in outputs] == expected
    assert max(output.num_cached_tokens or 0 for output in again) >= 64


@pytest.mark.parametrize("seed", range(50))
def test_what_is_promised_at_load_is_what_admission_holds(seed: int) -> None:
    """The longest sequence follows from the tables at load, and the block manager has a rule of its own."""
    rng = random.Random(seed)
    groups = CacheGroups.arrange(random_layers(rng))
    num_pages, chunk = rng.choice((60, 150, 1000)), rng.choice((1, 7, 100))
    longest = groups.max_tokens(num_pages, 4, chunk)
    manager = BlockManager(num_pages, 4, True, groups.specs, max_num_seqs=8, max_chunk_tokens=chunk)
    assert manager.can_hold(longest)
    assert longest > 10**9 or not manager.can_hold(longest + 1)


def test_experts_of_all_tokens_cannot_be_kept_where_no_layer_keeps_all(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("Qwen3MoeForCausalLM", 0, num_hidden_layers=2)
    readers = {**Qwen3MoeForCausalLM.config_readers, "windows": lambda _fields: (20, 7)}
    monkeypatch.setattr(Qwen3MoeForCausalLM, "config_readers", readers)
    with pytest.raises(ConfigError, match="no layer of Qwen3MoeForCausalLM keeps those of all tokens; leave it out"):
        LLM(folder, device="cpu", enable_return_routed_experts=True)
