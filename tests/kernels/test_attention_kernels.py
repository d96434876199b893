"""The attention kernels in Triton's interpreter, on the CPU, against `TorchBackend`. On a GPU: tests/gpu."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoinfer.engine.prefix_sharers import PrefixSharers
from nanoinfer.layers.attention.metadata import DecodeMetadata
from nanoinfer.ops.kv_cache.spec import LayerCache
from tests.attention_cases import (
    DECODE_CASES,
    EDGES,
    FP8,
    INT8,
    NAN,
    PREFILL_CASES,
    SEVERAL_TOKENS_CASES,
    SHARED_CASES,
    Case,
    Layer,
    Step,
    assert_close,
    random_step,
    shared_prefixes,
)

pytest.importorskip("triton")

from nanoinfer.layers.attention.triton import TritonBackend
from nanoinfer.ops.decode_attention import triton as decode_kernels
from nanoinfer.ops.decode_attention.triton import max_prefix_sharers, paged_decode_attention, plan_decode
from nanoinfer.ops.prefill_attention import triton as prefill_kernels
from nanoinfer.ops.prefill_attention.triton import TILE_ROWS, plan_prefill
from tests.kernels.helpers import exact_fp8, loops_are_interpreted

__all__ = ["exact_fp8"]

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here"),
    loops_are_interpreted,
    pytest.mark.usefixtures("exact_fp8"),
    # Of queries after the last of a group, whose results are not stored.
    pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning"),
]

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def eight_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts are cut for eight programs, which all KV heads share: as on a GPU of 4 multiprocessors."""
    monkeypatch.setattr(decode_kernels, "num_multiprocessors", lambda device: 4)


def assert_equals_specification(case: Case, **changes: object) -> Tensor:
    step = case.step(**changes)
    return step.assert_equals_specification(TritonBackend(step.spec))


# --- prefill ---


@pytest.mark.parametrize("name", PREFILL_CASES)
def test_prefill_equals_its_specification(name: str) -> None:
    assert_equals_specification(PREFILL_CASES[name])


def test_prefill_in_16_bits_equals_its_specification() -> None:
    assert_equals_specification(PREFILL_CASES["groups of 4, head_dim 128"], dtype=torch.float16)


@pytest.mark.parametrize("head_dim", [64, 256, 512])
def test_prefill_with_less_shared_memory_equals_its_specification(
    head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_kernels, "has_large_shared_memory", lambda device: False)
    assert_equals_specification(Case(Layer(1, head_dim, 1, block_size=256, window=50), (300, 40), (40, 40)))


def test_prefill_survives_scores_that_overflow_a_naive_softmax() -> None:
    step = random_step(Layer(), [40], [40])
    step.q *= 1000
    actual, expected = step.run(TritonBackend(step.spec)), step.run_specification()
    # Scores of thousands are rounded to 1e-4, so weights differ by as much where a CPU adds up in another order.
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("query_lens", [[40], None])
def test_a_soft_cap_holds_scores_however_large_they_are(query_lens: list[int] | None) -> None:
    """Scores of thousands, which would leave one key all the weight, become 2 and -2."""
    step = random_step(Layer(soft_cap=2.0), [40], query_lens)
    step.q *= 1000
    last = step.assert_equals_specification(TritonBackend(step.spec))[-1]
    assert last.abs().amax() < 0.5 * step.cache.v.nan_to_num().abs().amax()


def test_the_first_long_prompt_on_hopper_compiles_what_short_ones_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is launched with no tiles, and not again."""
    from nanoinfer.layers.attention import triton
    from nanoinfer.ops.prefill_attention import hopper

    step, launches = random_step(Layer(), [40, 600], [40, 600]), []
    expected = step.run(TritonBackend(step.spec))

    def compute(q: Tensor, cache: LayerCache, tiles: Tensor, *others: object) -> Tensor:
        launches.append((len(q), len(tiles)))
        return prefill_kernels.paged_prefill_attention(q, cache, tiles, *others)

    monkeypatch.setattr(triton, "LONG_CONTEXT", 0)
    monkeypatch.setattr(triton, "paged_prefill_attention", compute)
    monkeypatch.setattr(hopper, "hopper_prefill_attention", lambda *_: expected)
    backend = TritonBackend(step.spec, has_hopper_kernel=True)
    assert step.run(backend) is step.run(backend) is expected
    assert launches == [(1, 0)]


@pytest.mark.parametrize("group_size", [1, 2, 3, 7, 64, 200])
def test_a_plan_of_prefill_has_every_token_once_and_what_fits_into_a_tile(group_size: int) -> None:
    query_lens, context_lens = (1, 130, 3, 300), (5, 130, 3, 1000)
    tiles = plan_prefill(query_lens, context_lens, group_size, CPU, 128)
    assert tiles.dtype == torch.int32
    seen = []
    for first_token, num_tokens, position, chunk in tiles.tolist():
        assert 1 <= num_tokens <= max(1, TILE_ROWS // group_size)
        seen += [(first_token + i, position + i, chunk) for i in range(num_tokens)]
    positions = [
        (chunk, context - query + i)
        for chunk, (query, context) in enumerate(zip(query_lens, context_lens, strict=True))
        for i in range(query)
    ]
    assert sorted(seen) == [(token, position, chunk) for token, (chunk, position) in enumerate(positions)]


def test_a_plan_of_prefill_begins_with_the_longest_contexts() -> None:
    """Four query heads for a KV head: a tile has 32 tokens."""
    assert plan_prefill((3, 70), (3, 100), 4, CPU, 128).tolist() == [  # first token, tokens, first position, chunk
        [67, 6, 94, 1],
        [35, 32, 62, 1],
        [3, 32, 30, 1],
        [0, 3, 0, 0],
    ]


# --- decode ---


@pytest.mark.parametrize("name", DECODE_CASES)
def test_decode_equals_its_specification(name: str) -> None:
    out = assert_equals_specification(DECODE_CASES[name])
    is_empty = torch.tensor(DECODE_CASES[name].context_lens) == 0
    assert not out[is_empty].any(), "a row without context is zero"


def test_decode_in_16_bits_equals_its_specification() -> None:
    assert_equals_specification(DECODE_CASES["edges of blocks of 48"], dtype=torch.float16)


def test_decode_of_padding_alone_is_zero() -> None:
    step = random_step(Layer(), [0, 0, 0])
    assert step.run(TritonBackend(step.spec)).count_nonzero() == 0


@pytest.mark.parametrize("name", SEVERAL_TOKENS_CASES)
def test_decode_of_several_tokens_a_row_equals_its_specification(name: str) -> None:
    case = SEVERAL_TOKENS_CASES[name]
    assert case.num_row_tokens is not None
    out = assert_equals_specification(case)
    is_padding = torch.tensor(case.context_lens) == 0
    assert not out.unflatten(0, (len(is_padding), -1))[is_padding].any(), "a row without context is zero"


def test_decode_of_several_tokens_a_row_in_16_bits_equals_its_specification() -> None:
    assert_equals_specification(SEVERAL_TOKENS_CASES["8 tokens, groups of 4, head_dim 128"], dtype=torch.float16)


def test_rows_of_one_token_in_a_step_of_several_get_what_they_get_alone() -> None:
    step = random_step(Layer(num_kv_heads=1), EDGES, num_row_tokens=[3] + [1] * (len(EDGES) - 1))
    backend = TritonBackend(step.spec)
    metadata = step.metadata
    assert isinstance(metadata, DecodeMetadata)
    alone = replace(step, q=step.q[::3], metadata=replace(metadata, num_tokens=1, num_row_tokens=None))
    assert_close(step.run(backend)[::3], alone.run(backend))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy warns of NaN
def test_a_token_of_nan_spoils_no_other_of_its_row() -> None:
    step = random_step(Layer(num_kv_heads=1), [40, 33], num_row_tokens=[4, 4])
    backend = TritonBackend(step.spec)
    expected = step.run(backend)
    step.q[[1, 2, 6]] = NAN
    actual = step.run(backend)
    assert actual[[1, 2, 6]].isnan().all()
    others = [0, 3, 4, 5, 7]
    assert torch.equal(actual[others], expected[others])


def test_more_queries_than_a_tile_holds_are_an_error() -> None:
    step = random_step(Layer(16), [20], num_row_tokens=[5])
    with pytest.raises(AssertionError, match="5 tokens of 16 heads do not fit into a tile"):
        step.run(TritonBackend(step.spec))


def decode(q: Tensor, cache: LayerCache, tables: list[list[int]], lens: list[int]) -> Tensor:
    """Decode with the scale 0.125."""
    block_tables, context_lens = (torch.tensor(x, dtype=torch.int32) for x in (tables, lens))
    plan = plan_decode(context_lens, block_tables, *cache.k.shape[2:])
    return paged_decode_attention(q, cache, plan, scale=0.125)


def test_decode_survives_scores_that_overflow_a_naive_softmax() -> None:
    q = torch.full((1, 1, 64), 100.0)
    k, v = torch.zeros(1, 1, 16, 64), torch.zeros(1, 1, 16, 64)
    k[0, 0, :4] = torch.tensor([[-100.0], [100.0], [100.0], [99.0]])  # scores of 80,000 and so on
    v[0, 0, :4] = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    out = decode(q, LayerCache(k, v), [[0]], [4])
    torch.testing.assert_close(out, torch.full_like(out, 3.0))  # the mean of the two best


@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
def test_decode_does_not_depend_on_how_the_contexts_are_shared_out(num_kv_heads: int) -> None:
    """7 tiles of 32 tokens, and eight programs, two programs or one for each head."""
    assert_equals_specification(Case(Layer(num_kv_heads=num_kv_heads, block_size=32), (96, 33, 0, 1)))


@pytest.mark.parametrize(
    "case",
    [
        Case(Layer(3, num_kv_heads=1), (1, 150, 0, 90)),
        Case(Layer(has_sinks=True, window=40, block_size=48), (1, 20, 0, 133)),
        Case(Layer(num_kv_heads=1), (100, 20), num_row_tokens=(3, 1)),
        SHARED_CASES["two groups of rows, groups of 2"],
    ],
)
def test_programs_that_combine_by_rows_leave_the_bits_of_those_by_shares(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_kernels, "ROWS_TO_SHARES", 0)
    by_rows = assert_equals_specification(case)
    monkeypatch.setattr(decode_kernels, "ROWS_TO_SHARES", 1000)
    assert torch.equal(by_rows, assert_equals_specification(case))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy warns of NaN
def test_a_row_of_nan_does_not_spoil_the_next_one() -> None:
    """With 8 KV heads, one program goes through all rows of a head."""
    step = random_step(Layer(num_kv_heads=8), [40, 40])
    backend = TritonBackend(step.spec)
    expected = step.run(backend)[1]
    step.q[0] = NAN
    actual = step.run(backend)
    assert actual[0].isnan().all()
    assert torch.equal(actual[1], expected)


TABLES = torch.tensor([[3, 1], [9, 9], [2, 9]], dtype=torch.int32)


def plan_of_blocks_of_48(
    lens: list[int],
    first_tokens: list[int] | None = None,
    least_tiles: int = 1,
    num_row_tokens: list[int] | None = None,
) -> tuple[list[list[int]], list[int]]:
    """The tiles of 16 tokens that there are, and where those of each row begin."""
    lens_, first, row_tokens = (
        None if numbers is None else torch.tensor(numbers, dtype=torch.int32)
        for numbers in (lens, first_tokens, num_row_tokens)
    )
    assert lens_ is not None
    tiles, row_starts, tile_size = plan_decode(lens_, TABLES, 48, 128, first, least_tiles, num_row_tokens=row_tokens)
    assert tile_size == 16
    return tiles[: row_starts[-1]].tolist(), row_starts.tolist()


def test_a_plan_lists_the_tiles_of_all_rows_end_to_end() -> None:
    tiles, row_starts = plan_of_blocks_of_48([70, 0, 48])
    assert row_starts == [0, 5, 6, 9]
    assert tiles == [  # slot of the first token, tokens from there on, row, whether it is the row's last
        [144, 70, 0, 0],
        [160, 54, 0, 0],
        [176, 38, 0, 0],
        [48, 22, 0, 0],
        [64, 6, 0, 1],
        [432, 0, 1, 1],  # an empty context has a tile, in which nothing is visible
        [96, 48, 2, 0],
        [112, 32, 2, 0],
        [128, 16, 2, 1],
    ]


def test_a_plan_begins_with_the_tile_of_the_first_token_that_a_row_attends_to() -> None:
    tiles, row_starts = plan_of_blocks_of_48([70, 0, 48], first_tokens=[20, -8, 40])
    assert row_starts == [0, 4, 5, 6]
    assert tiles == [  # flags: 1 ends the row, 2 for a row that leaves tokens out, 256 x how far on the first one lies
        [160, 54, 0, 2 + 256 * 4],
        [176, 38, 0, 2 - 256 * 12],
        [48, 22, 0, 2 - 256 * 28],
        [64, 6, 0, 1 + 2 - 256 * 44],
        [432, 0, 1, 1 - 256 * 8],
        [128, 16, 2, 1 + 2 + 256 * 8],
    ]


def test_a_plan_of_rows_of_several_tokens_goes_on_to_the_last_token_of_each() -> None:
    """The first row's fourth token begins a tile, the padding row has none, and the last row has a single token."""
    tiles, row_starts = plan_of_blocks_of_48([61, 0, 16], num_row_tokens=[4, 3, 1])
    assert row_starts == [0, 4, 5, 6]
    assert tiles == [  # tokens to the row's first query token; flags: 4 x the query tokens after it
        [144, 61, 0, 4 * 3],
        [160, 45, 0, 4 * 3],
        [176, 29, 0, 4 * 3],
        [48, 13, 0, 1 + 4 * 3],
        [432, 0, 1, 1],
        [96, 16, 2, 1],
    ]
    tiles, row_starts = plan_of_blocks_of_48([62, 0, 16], num_row_tokens=[4, 3, 2])
    assert row_starts == [0, 5, 6, 8]
    assert tiles[3:5] == [[48, 14, 0, 4 * 3], [64, -2, 0, 1 + 4 * 3]]
    assert tiles[6:] == [[96, 16, 2, 4], [112, 0, 2, 1 + 4]]


def test_a_plan_of_groups_has_no_tiles_for_rows_that_begin_none() -> None:
    tiles, row_starts = plan_of_blocks_of_48([0, 48, 0], least_tiles=0)
    assert row_starts == [0, 0, 3, 3]
    assert tiles == [[432, 48, 1, 0], [448, 32, 1, 0], [464, 16, 1, 1]]


# --- shared prefixes ---


@pytest.mark.parametrize("name", SHARED_CASES)
def test_rows_that_read_a_prefix_together_get_what_each_gets_alone(name: str) -> None:
    case = SHARED_CASES[name]
    is_padding = torch.tensor(case.context_lens) == 0
    assert not assert_equals_specification(case)[is_padding].any()


def test_a_prefix_read_together_in_16_bits_equals_the_specification() -> None:
    assert_equals_specification(SHARED_CASES["two groups of rows, groups of 2"], dtype=torch.float16)


def test_the_most_sharers_of_a_prefix_have_64_queries() -> None:
    assert [max_prefix_sharers(size) for size in (1, 2, 7, 16, 33, 64)] == [64, 32, 9, 4, 1, 1]
    assert [max_prefix_sharers(size, num_tokens=3) for size in (1, 2, 7, 16)] == [21, 10, 3, 1]
    assert [max_prefix_sharers(size, head_dim=512) for size in (1, 4, 8, 16, 32)] == [32, 8, 4, 2, 1]


def test_a_step_whose_groups_are_all_empty_is_a_step_without_groups() -> None:
    """As a CUDA graph of such steps is captured, on padding alone."""
    for context_lens in ([20, 40], [0, 0]):
        step = random_step(Layer(num_kv_heads=1), context_lens)
        backend = TritonBackend(step.spec)
        expected = step.run(backend)
        step.metadata = replace(step.metadata, shared_prefixes=shared_prefixes([], 2, "cpu"))
        assert torch.equal(step.run(backend), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy warns of NaN
def test_a_row_of_nan_spoils_no_other_row_of_its_group() -> None:
    step = random_step(Layer(num_kv_heads=1), [40, 33, 50], prefix_sharers=[PrefixSharers(0, 3, 2)])
    backend = TritonBackend(step.spec)
    expected = step.run(backend)
    step.q[1] = NAN
    actual = step.run(backend)
    assert actual[1].isnan().all()
    assert torch.equal(actual[::2], expected[::2])


def test_windowed_layers_read_each_row_for_itself_and_ignore_groups() -> None:
    case = Case(Layer(num_kv_heads=1, window=20), (40, 33, 50), prefix_sharers=(PrefixSharers(0, 3, 2),))
    assert TritonBackend(case.layer.spec).max_prefix_sharers == 0
    assert_equals_specification(case)


# --- any step ---


def run_on(num_multiprocessors: int, step: Step) -> Tensor:
    """Run a step on a GPU of so many multiprocessors: contexts are cut in other places."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_kernels, "num_multiprocessors", lambda device: num_multiprocessors)
        return step.run(TritonBackend(step.spec))


layers = st.builds(
    Layer,
    group_size=st.sampled_from([1, 2, 3, 7]),
    head_dim=st.sampled_from([64, 72]),
    num_kv_heads=st.integers(1, 2),
    block_size=st.sampled_from([16, 32, 48]),
    window=st.none() | st.integers(1, 80),
    cache_dtype=st.sampled_from([None, INT8, FP8]),
    has_sinks=st.booleans(),
    soft_cap=st.sampled_from([None, None, 0.3, 50.0]),
)


@settings(max_examples=15, deadline=None)
@given(layer=layers, lens=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 60)), min_size=1, max_size=4))
def test_any_prefill_equals_its_specification(layer: Layer, lens: list[tuple[int, int]]) -> None:
    """Chunks of (cached tokens, new tokens)."""
    step = random_step(layer, [cached + new for cached, new in lens], [new for _, new in lens])
    step.assert_equals_specification(TritonBackend(step.spec))


@settings(max_examples=12, deadline=None)
@given(layer=layers, context_lens=st.lists(st.integers(0, 110), min_size=1, max_size=6), size=st.integers(1, 4))
def test_any_decode_equals_its_specification(layer: Layer, context_lens: list[int], size: int) -> None:
    step = random_step(layer, context_lens)
    has_context = torch.tensor(context_lens) > 0
    assert_close(run_on(size, step)[has_context], step.run_specification()[has_context])


@settings(max_examples=12, deadline=None)
@given(
    layer=layers,
    rows=st.lists(st.tuples(st.integers(0, 110), st.integers(1, 9)), min_size=1, max_size=6),
    size=st.integers(1, 4),
)
def test_any_decode_of_several_tokens_a_row_equals_its_specification(
    layer: Layer, rows: list[tuple[int, int]], size: int
) -> None:
    """Rows of (tokens that the first one attends to, tokens)."""
    context_lens, num_row_tokens = zip(*rows, strict=True)
    step = random_step(layer, context_lens, num_row_tokens=num_row_tokens)
    has_context = (torch.tensor(context_lens) > 0).repeat_interleave(max(num_row_tokens))
    assert_close(run_on(size, step)[has_context], step.run_specification()[has_context])


families = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(1, 40), min_size=1, max_size=4)), max_size=3)


@settings(max_examples=12, deadline=None)
@given(layer=layers, families=families, num_padding=st.integers(0, 2), size=st.integers(1, 4), data=st.data())
def test_rows_that_leave_their_groups_change_no_result(
    layer: Layer, families: list[tuple[int, list[int]]], num_padding: int, size: int, data: st.DataObject
) -> None:
    """Families of rows with so many shared blocks, and the lengths of their own parts."""
    context_lens, groups = [], []
    for num_blocks, own_lens in families:
        if num_blocks and len(own_lens) > 1:
            groups.append(PrefixSharers(len(context_lens), len(own_lens), num_blocks))
        context_lens += [num_blocks * layer.block_size + length for length in own_lens]
    num_rows = len(context_lens)
    step = random_step(replace(layer, window=None), context_lens + [0] * max(num_padding, num_rows == 0), None, groups)
    expected = step.run_specification()[:num_rows]
    assert_close(run_on(size, step)[:num_rows], expected)

    staying = data.draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows))
    rows = [row for row in range(num_rows) if staying[row]]
    fewer = []
    for first_row, count, num_blocks in groups:
        left = [rows.index(row) for row in range(first_row, first_row + count) if staying[row]]
        if len(left) > 1:
            fewer.append(PrefixSharers(left[0], len(left), num_blocks))
    if rows:
        assert_close(run_on(size, rows_of(step, rows, fewer)), expected[rows])


def rows_of(step: Step, rows: list[int], groups: list[PrefixSharers]) -> Step:
    metadata = step.metadata
    assert isinstance(metadata, DecodeMetadata)
    metadata = DecodeMetadata(
        slot_mapping=metadata.slot_mapping[rows],
        context_lens=metadata.context_lens[rows],
        block_tables=metadata.block_tables[rows],
        shared_prefixes=shared_prefixes(groups, len(rows), "cpu") if groups else None,
    )
    return replace(step, q=step.q[rows], metadata=metadata)
