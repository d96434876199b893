"""A decode step of several tokens a row, from the tables to the logits, against steps of one token each, on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoinfer import LLM
from nanoinfer.device import computing
from nanoinfer.layers.attention.metadata import DecodeBatch
from nanoinfer.runner.device_runner import DeviceRunner
from nanoinfer.runner.model_runner import ModelRunner
from tests.models.test_architectures import save_random_model
from tests.models.tiny_transformers import write_tiny

BLOCK_SIZE, NUM_BLOCKS, LONGEST = 16, 5, 80  # of a row
KNOWN = (7, 13, 30, 46, 64)  # tokens of each row with the newest; the next ones lie in other blocks, and leave windows
COUNTS = (4, 1, 4, 4, 3)  # tokens of each row in the step
SIZES = {"vocab_size": 160, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {"num_hidden_layers": 2},
    "Gemma2ForCausalLM": {"num_hidden_layers": 2, "sliding_window": 9, "attn_logit_softcapping": 0.5},
    "GptOssForCausalLM": {"num_hidden_layers": 2, "sliding_window": 9, "num_local_experts": 4},
    "Llama4ForCausalLM": {"attention_chunk_size": 32, "floor_scale": 512},  # by transformers' layers
}


def write(folder: Path, architecture: str) -> None:
    options = MODELS[architecture]
    if architecture == "Llama4ForCausalLM":
        write_tiny(architecture, folder, **options)
    else:
        save_random_model(folder, architecture, {**SIZES, "intermediate_size": 48, **options}, seed=0)


def logits_of(runner: ModelRunner, lens: Tensor, rows: Tensor, *several: Any) -> Tensor:
    """The logits of a decode step of rows that know so many tokens."""
    runner.state.tables.context_lens[rows.long()] = lens
    batch = DecodeBatch(rows, None, *several)
    runner.decode(batch)
    return runner.state.buffers.logits[: len(rows) * batch.num_tokens].clone()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("architecture", MODELS)
def test_logits_of_several_tokens_a_row_are_those_of_single_steps(
    architecture: str, kv_cache_dtype: str, tmp_path: Path
) -> None:
    """Rows 0 to 4 compute one token at a time. Rows 5 to 9 have the same texts in other blocks.

    They compute the last tokens in one step, in which two rows have padding.
    """
    write(tmp_path, architecture)
    num_rows, most = len(KNOWN), max(COUNTS)
    options = {"max_num_seqs": 2 * num_rows * most, "max_model_len": LONGEST, "kvcache_block_size": BLOCK_SIZE}
    cache = {"num_kvcache_blocks": 2 * 2 * num_rows * NUM_BLOCKS, "kv_cache_dtype": kv_cache_dtype}
    with LLM(tmp_path, device="cpu", dtype="float32", **options, **cache) as llm, computing(torch.device("cpu"), 1):
        assert isinstance(llm.engine.runner, DeviceRunner)
        runner = llm.engine.runner.model_runner
        tables = runner.state.tables
        rows = torch.arange(2 * num_rows, dtype=torch.int32)
        generator = torch.Generator().manual_seed(0)
        texts = torch.randint(3, 150, (num_rows, LONGEST), generator=generator, dtype=torch.int32)
        tables.token_ids[: 2 * num_rows, :LONGEST] = texts.repeat(2, 1)
        assert set(runner.state.kv_cache.id_strides) == {1}
        blocks = torch.randperm(cache["num_kvcache_blocks"], generator=generator).int()
        for table, its in zip(tables.tables, blocks.view(2, 2 * num_rows, NUM_BLOCKS), strict=False):
            table[: 2 * num_rows, :NUM_BLOCKS] = its
        single: dict[tuple[int, int], Tensor] = {}
        known_lens, counts = torch.tensor([KNOWN, COUNTS], dtype=torch.int32)
        last = torch.cat((known_lens + counts - 1, known_lens - 1))  # rows 5 to 9 stop before the step of several
        for length in range(1, int(last.max()) + 1):
            going = rows[last >= length]
            lens = torch.full_like(going, length)
            for row, logits in zip(going.tolist(), logits_of(runner, lens, going), strict=True):
                single[row, length] = logits
        logits = logits_of(runner, known_lens, rows[num_rows:], most, counts).unflatten(0, (num_rows, most))
        for row, (known, count) in enumerate(zip(KNOWN, COUNTS, strict=True)):
            for token in range(count):
                torch.testing.assert_close(logits[row, token], single[row, known + token], rtol=1e-4, atol=1e-4)
        assert logits.isfinite().all()
        # The step has written the keys and values of its tokens, which the next one reads.
        ends = known_lens + counts
        after, expected = (logits_of(runner, ends, half) for half in (rows[num_rows:], rows[:num_rows]))
        torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-4)
