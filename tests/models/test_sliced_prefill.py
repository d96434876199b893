"""Prefill in slices, on a CPU in one process, where sums need no exchange: the tokens of the common path."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoinfer.distributed.tensor_parallel import SLICE_TOKENS, TensorParallel
from nanoinfer.layers.layernorm import RMSNorm
from nanoinfer.layers.linear import PartialSum
from nanoinfer.models import execution, sliced_prefill
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.models.layer_stack import Way
from tests.models.test_architectures import ARCHITECTURES, HYBRIDS, LATENT, checkpoint, draw_prompts, generate  # noqa: F401 (a fixture)

RUN_WHOLE = (
    *HYBRIDS,
    *LATENT,
    "Cohere2ForCausalLM",
    "Exaone4ForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4UnifiedForCausalLM",
    "GraniteForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many slices each step had: those of six tokens and more, slices of at most five."""
    found: list[int] = []

    def sliced(decoder: Decoder, step: ForwardStep) -> Tensor:
        found.append(-(-len(step.token_ids) // 5))
        return sliced_prefill.sliced_prefill(decoder, step)

    def add(part: sliced_prefill.Slice, terms: PartialSum, sum_norm: RMSNorm | None) -> None:
        all_terms = terms.terms if terms.other_terms is None else torch.cat((terms.terms, terms.other_terms))
        add_one(part, PartialSum(all_terms.sum(0, keepdim=True)), sum_norm)  # as experts of several ranks do

    add_one = sliced_prefill.Slice.add
    monkeypatch.setattr(sliced_prefill.Slice, "add", add)
    monkeypatch.setattr(sliced_prefill, "SLICE_TOKENS", 5)
    monkeypatch.setattr(execution, "suits_slices", lambda decoder, num_tokens: num_tokens > 5)
    monkeypatch.setattr(execution, "sliced_prefill", sliced)
    return found


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in RUN_WHOLE])
def test_slices_give_the_tokens_of_whole_steps(
    request: pytest.FixtureRequest,
    checkpoint: Callable[..., Path],  # noqa: F811
    architecture: str,
) -> None:
    """Prompts are cut into chunks, so that slices also attend to what is in the cache."""
    folder, prompts = checkpoint(architecture, 0), draw_prompts(0, (61, 1, 29, 40, 7))
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "kvcache_block_size": 16, "max_model_len": 112}
    expected = generate(folder, prompts, **options)
    counts = request.getfixturevalue("counts")
    assert generate(folder, prompts, **options) == expected
    assert max(counts) == 10
    assert len(set(counts)) > 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"num_tokens": SLICE_TOKENS}, False),
        ({"size": 1}, False),
        ({"is_prefill": False}, False),
        ({"ways": {Way.FEW_ROWS, Way.GRAPHS}}, False),
        ({"copy_engines": None}, False),
        ({"copy_engines": None, "device": "cpu"}, True),
        ({"symmetric_memory": SimpleNamespace(max_tokens=2047)}, True),
        ({"symmetric_memory": SimpleNamespace(max_tokens=2048)}, False),  # the second slice of 4,097 tokens has as many
    ],
)
def test_large_prefill_steps_of_several_ranks_have_slices(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], expected: bool
) -> None:
    found = SimpleNamespace(
        num_tokens=SLICE_TOKENS + 1,
        is_prefill=True,
        size=2,
        ways={Way.SLICES},
        copy_engines="copy engines",
        symmetric_memory=None,
        device="cuda",
    )
    vars(found).update(changes)

    class ADecoder(SimpleNamespace):
        def __call__(self, _step: Any, _run_layer: Any = None) -> str:
            return "in one piece"

    decoder: Any = ADecoder(
        tp=found,
        layers=[SimpleNamespace(ways={*Way}), SimpleNamespace(ways=found.ways)],
        embed_tokens=SimpleNamespace(weight=torch.zeros(1, 1, device="meta" if found.device == "cuda" else "cpu")),
    )
    step: Any = SimpleNamespace(
        token_ids=range(found.num_tokens), attention=found, adapters=None, images=None, routed=None
    )
    monkeypatch.setattr(execution, "sliced_prefill", lambda *_: "in slices")
    assert execution.forward(decoder, step) == ("in slices" if expected else "in one piece")


def test_steps_with_the_largest_slices_and_in_one_piece_are_measured_too() -> None:
    in_slices: Any = TensorParallel(0, 2, copy_engines=SimpleNamespace())  # type: ignore[arg-type]
    assert execution.sizes_to_measure(16384, TensorParallel(0, 2)) == [16384]
    assert execution.sizes_to_measure(16384, in_slices) == [4096, 16384]
    assert execution.sizes_to_measure(12300, in_slices) == [4096, 12288, 12300]
    assert execution.sizes_to_measure(100, in_slices) == [100]
