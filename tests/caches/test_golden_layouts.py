"""How the caches of all architectures are laid out, and what they hold, compared with what was so before.

`python -m tests.caches.test_golden_layouts` writes the file anew. Its difference says what a change of the layouts
changes: which layers share a block table, how many bytes a page has, how long a sequence may be, what the log says.
"""

import json
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nanoinfer.bench.workloads import EMBEDDERS, SIZES
from nanoinfer.caches.kv_cache import page_bytes
from nanoinfer.caches.kv_cache_layout import KVCacheLayout
from nanoinfer.caches.recurrent_states import StateLayout
from nanoinfer.checkpoint.base_config import BaseModelConfig
from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.errors import ModelError
from nanoinfer.models.native_config import read_native_config
from nanoinfer.runner import memory
from tests.checkpoint.test_golden_configs import variants

GOLDEN = Path(__file__).with_name("golden_layouts.json")
LENGTHS = 1, 1000, 32768
POOLS = 9, 100, 5000
FREE_BYTES = 40 * 2**30


def configs() -> Iterator[tuple[str, ModelConfig]]:
    """All architectures, in small and with what their configs may say, and the sizes of the benchmarks."""
    embedders = {name: {"architectures": [architecture], **raw} for name, (architecture, raw) in EMBEDDERS.items()}
    for name, raw in (*variants(), *SIZES.items(), *embedders.items()):
        with suppress(ModelError):  # some say what is refused
            yield name, read_native_config(raw)


def tables(config: BaseModelConfig, longest: int) -> dict[str, Any]:
    """Which layers share a block table, and what follows for sequences."""
    layout = KVCacheLayout.of(config, longest, TensorParallel())
    sizes = [(block_size, chunk) for block_size in (16, 256) for chunk in (512, 16384)]
    return {
        "windows": [table.window for table in layout.tables],
        "layers per page": len(layout.tables[0].layers),
        "places": " ".join(f"{table}.{layer}" for table, layer in layout.places),
        "pages of blocks": [layout.num_pages_of(count) for count in (1, 10)],
        "pages": [layout.num_pages(length, *size) for size in sizes for length in LENGTHS],
        "tokens": [layout.max_tokens(pages, *size) for size in sizes for pages in POOLS],
        "text": layout.describe(5000, *sizes[-1]),
    }


def num_bytes(config: BaseModelConfig, tp: TensorParallel) -> dict[str, Any]:
    """What pages and states take on one rank, and how many fit."""
    layout = KVCacheLayout.of(config, config.max_model_len, tp)
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.int8):
        size = page_bytes(layout, 256, dtype)
        pages = memory.num_blocks_in(FREE_BYTES, size, layout.num_pages_of(1), 256)
        found[str(dtype)] = [size, pages, layout.max_tokens(pages, 256, 16384)]
    states = StateLayout.of(config, torch.bfloat16, tp)
    if states is not None:
        counts = [
            states.max_rows(256, FREE_BYTES),
            states.max_rows(256, 2**28),
            states.num_snapshots(256, FREE_BYTES),
            states.num_snapshots(1, 2**28),
        ]
        found["states"] = [states.row_bytes, *counts]
    return found


def check_sum(found: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(found, sort_keys=True).encode()):08x}"


def patterns() -> Iterator[tuple[str, BaseModelConfig]]:
    """Models of so many layers with a window, and every so often one that attends to all tokens."""
    config = read_native_config({"architectures": ["LlamaForCausalLM"], **SIZES["llama-8B"]})
    for num_layers in (1, 2, 3, 5, 8, 12, 26, 48, 62):
        for period in (1, 2, 3, 4, 6, 8, 9, 11):
            for offset in sorted({0, period - 1}):
                full = [index % period == offset for index in range(num_layers)]
                windows = tuple(None if is_full else 1024 for is_full in full)
                name = f"{num_layers} layers, {offset} of {period} full"
                yield name, replace(config, num_hidden_layers=num_layers, windows=windows)


def record() -> dict[str, Any]:
    """All that the golden file has: the sizes of the benchmarks in full, of all others a check sum."""
    found: dict[str, Any] = {"sizes": {}, "others": {}, "patterns": {}}
    for name, config in configs():
        described = {f"up to {longest}": tables(config, longest) for longest in (config.max_model_len, 1024, 12)}
        described |= {f"{size} ranks": num_bytes(config, TensorParallel(0, size)) for size in (1, 2, 4)}
        if name in SIZES or name in EMBEDDERS:
            found["sizes"][name] = described
        else:
            found["others"][name] = check_sum(described)
    for name, config in patterns():
        described = tables(config, 131072)
        found["patterns"][name] = f"{len(described['windows'])} tables, {check_sum(described)}"
    return found


def test_caches_are_laid_out_as_before() -> None:
    golden, found = json.loads(GOLDEN.read_text(encoding="utf-8")), record()
    for part, cases in golden.items():
        assert found[part].keys() == cases.keys()
        for name, case in cases.items():
            assert found[part][name] == case, name


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(record(), indent=0, sort_keys=True) + "\n", encoding="utf-8")
