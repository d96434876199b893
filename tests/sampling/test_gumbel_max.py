"""The sampler: Philox against its published answers, the noise, and the distribution of the draws."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.ops.gumbel_max.spec import GROUP_SIZE, best_candidates, exponential, philox, sample, sample_and_append
from nanoinfer.sampling.draws import Draws
from nanoinfer.sampling.logits_processors import Lines

MASK32 = 0xFFFFFFFF


def tensor(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def draw(logits: Tensor, temperature: float, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw from the same logits (vocab_size,) once for each seed and position."""
    rows = logits.repeat(len(seeds), 1)
    return sample(rows, torch.full((len(seeds),), temperature), seeds, positions.int())


# --- Philox ---


def philox_in_python(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox-4x32-10 as its paper states it, on Python's whole numbers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def test_the_reference_gives_the_known_answers_of_random123() -> None:
    zeros = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert philox_in_python((0,) * 4, (0,) * 2) == zeros
    assert philox_in_python((MASK32,) * 4, (MASK32,) * 2) == ones


@pytest.mark.parametrize("seed", [0, 1, -1, MASK32, 2**32, 2**63 - 1, -(2**63), 0x299F31D0A4093822])
@pytest.mark.parametrize("counter", [(0, 0, 0), (1, 0, 1), (0, 1, 0), (38000, 131071, 1), (MASK32, MASK32, MASK32)])
def test_philox_equals_the_reference(seed: int, counter: tuple[int, int, int]) -> None:
    numbers = philox(tensor(seed), tensor(counter[0]), tensor(counter[1]), tensor(counter[2]))
    key = (seed & MASK32, (seed >> 32) & MASK32)
    assert tuple(number.item() for number in numbers) == philox_in_python((*counter, 0), key)


def test_philox_broadcasts_seeds_against_counters() -> None:
    together = philox(tensor(3, 4).unsqueeze(1), tensor(0, 1, 2), tensor(5, 6).unsqueeze(1), tensor(1))
    assert together[0].shape == (2, 3)
    alone = philox(tensor(4), tensor(2), tensor(6), tensor(1))
    assert [numbers[1, 2] for numbers in together] == [numbers[0] for numbers in alone]


# --- noise ---


def test_an_exponential_number_has_the_mean_and_the_variance_of_its_distribution() -> None:
    bits = torch.stack(philox(tensor(7), torch.arange(50000), tensor(9), tensor(0)))
    numbers = exponential(bits).double()
    # The mean of 200,000 draws is good to 1 / sqrt(200,000), about 0.002.
    assert numbers.mean().item() == pytest.approx(1.0, abs=0.01)
    assert numbers.var().item() == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("bits", [0, 1, 100, 2**31, MASK32 - 255, MASK32 - 1, MASK32])
def test_the_noise_is_finite_and_right_for_any_bits(bits: int) -> None:
    """The smallest are the winners' noise: log(1 - u) written plainly would be 0 for them."""
    uniform = min((bits + 0.5) / 2**32, 1 - 2**-24)
    assert exponential(tensor(bits)).item() == pytest.approx(-math.log1p(-uniform), rel=1e-6)


def draw_in_python(logits: list[float], temperature: float, seed: int, position: int) -> int:
    """The draw as `sample` states it, in Python's double precision."""

    def exponential(counter: tuple[int, ...], word: int) -> float:
        bits = philox_in_python(counter, (seed & MASK32, (seed >> 32) & MASK32))[word]
        return -math.log1p(-min((bits + 0.5) / 2**32, 1 - 2**-24))

    def noisy_score(group: int) -> float:
        members = logits[group * GROUP_SIZE : (group + 1) * GROUP_SIZE]
        rate = sum(math.exp(logit / temperature) for logit in members)
        return math.log(rate) - math.log(exponential((group // 4, position, 0, 0), group % 4))

    group = max(range(-(-len(logits) // GROUP_SIZE)), key=noisy_score)
    ids = range(group * GROUP_SIZE, min((group + 1) * GROUP_SIZE, len(logits)))
    return max(ids, key=lambda i: logits[i] / temperature - math.log(exponential((i, position, 1, 0), 0)))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_are_those_of_the_definition(temperature: float) -> None:
    logits = torch.randn(8 * GROUP_SIZE + 3, generator=torch.Generator().manual_seed(1))
    seeds, positions = torch.arange(40) * 2**30, torch.arange(40)
    expected = [
        draw_in_python(logits.tolist(), temperature, seed, position)
        for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    assert draw(logits, temperature, seeds, positions).tolist() == expected


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 5, GROUP_SIZE, GROUP_SIZE + 1])
def test_ids_without_a_chance_change_no_draw(vocab_size: int) -> None:
    logits = torch.full((8 * GROUP_SIZE,), -math.inf)
    logits[:vocab_size] = 0.0
    seeds = torch.arange(100)
    assert torch.equal(draw(logits, 1.0, seeds, seeds), draw(logits[:vocab_size], 1.0, seeds, seeds))


# --- draws ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temperature_0_takes_the_best_and_of_equals_the_lowest_id(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0], [-5.0, -7.0, -6.0, -4.0]], dtype=dtype)
    unchanged = logits.clone()
    ids = sample(logits, torch.zeros(3), tensor(1, 2, 3), tensor(3, 4, 5))
    assert (ids.tolist(), ids.dtype) == ([1, 0, 3], torch.int32)
    assert torch.equal(logits, unchanged)


def test_greedy_rows_alone_which_need_no_noise_get_what_they_get_beside_one_that_is_drawn() -> None:
    logits = torch.randn(6, 3 * GROUP_SIZE + 1, generator=torch.Generator().manual_seed(0)).round()  # many are equal
    logits[1, 3], logits[2, 20], logits[3] = math.nan, math.inf, -math.inf
    temperatures, rows = torch.tensor([0.0] * 5 + [1.0]), torch.arange(6)
    tables = temperatures, rows + 7, rows.int() + 3
    scores, ids = best_candidates(logits, 64, rows, *tables)
    scores_alone, ids_alone = best_candidates(logits[:5], 64, rows[:5], *tables)
    assert torch.equal(scores_alone, scores[:5])
    finite = scores_alone.isfinite()
    assert finite.tolist() == [True, False, False, False, True]
    assert torch.equal(ids_alone[finite], ids[:5][finite])


CRITICAL_VALUE = 24.3  # of chi-square with 7 degrees of freedom at 0.1%
EIGHT_LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, 0.7])


PLACES = {
    "in one group": [0, 1, 2, 3, 4, 5, 6, 15],
    "each in a group of its own": [0, 17, 34, 51, 68, 85, 102, 119],
    "in groups of three, two and one": [0, 7, 15, 16, 17, 40, 60, 127],
}


def placed_logits(places: list[int]) -> Tensor:
    """EIGHT_LOGITS for the ids `places` of 128; the others are never drawn."""
    return torch.full((128,), -math.inf).index_put((tensor(*places),), EIGHT_LOGITS)


def chi_square(ids: Tensor, probabilities: Tensor) -> float:
    expected = len(ids) * probabilities
    counts = torch.bincount(ids, minlength=len(probabilities))
    return ((counts - expected) ** 2 / expected).sum().item()


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_over_seeds_and_over_positions_follow_the_softmax(temperature: float, places: list[int]) -> None:
    numbers, same = torch.arange(20000), torch.full((20000,), 12345)
    for seeds, positions in ((numbers, same), (same, numbers)):
        ids = draw(placed_logits(places), temperature, seeds, positions)
        drawn = (ids.unsqueeze(1) == tensor(*places)).int().argmax(1)
        assert chi_square(drawn, (EIGHT_LOGITS / temperature).softmax(dim=0)) < CRITICAL_VALUE


def test_the_chi_square_test_sees_a_wrong_temperature() -> None:
    seeds = torch.arange(20000)
    ids = draw(EIGHT_LOGITS, 1.1, seeds, torch.zeros_like(seeds))
    assert chi_square(ids, EIGHT_LOGITS.softmax(dim=0)) > CRITICAL_VALUE


def test_neighbouring_positions_draw_independently() -> None:
    """The pairs of successive draws are as frequent as the product of their probabilities says."""
    positions = torch.arange(20001)
    logits = torch.tensor([0.5, 0.0, -0.5])
    ids = draw(logits, 1.0, torch.full_like(positions, 3), positions)
    pairs = 3 * ids[:-1] + ids[1:]
    probabilities = torch.outer(logits.softmax(dim=0), logits.softmax(dim=0)).flatten()
    assert chi_square(pairs, probabilities) < 26.1  # 8 degrees of freedom at 0.1%


def test_a_request_draws_the_same_alone_and_in_any_batch() -> None:
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    temperatures = torch.tensor([1.0, 0.0, 2.0, 0.7, 1.0])
    seeds, positions = tensor(11, 22, 33, 44, 55), torch.tensor([1, 2, 3, 4, 5], dtype=torch.int32)

    def run(rows: list[int]) -> list[int]:
        return sample(logits[rows], temperatures[rows], seeds[rows], positions[rows]).tolist()

    together = run([0, 1, 2, 3, 4])
    assert [run([row])[0] for row in range(5)] == together
    assert run([4, 3, 2, 1, 0]) == together[::-1]


def test_another_seed_or_another_position_is_another_stream() -> None:
    flat = torch.zeros(1000)
    seeds, positions = tensor(0, 1, 0, 2**32, 2**40), tensor(0, 0, 1, 0, 0)
    ids = draw(flat, 1.0, seeds, positions).tolist()
    assert len(set(ids)) == 5
    assert draw(flat, 1.0, seeds, positions).tolist() == ids


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_what_has_a_logit_of_minus_infinity_is_never_drawn(temperature: float) -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, -50.0, -math.inf])
    seeds = torch.arange(2000)
    ids = draw(logits, temperature, seeds, torch.zeros_like(seeds))
    assert set(ids.tolist()) <= {1, 3}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_best_gives_no_token_and_a_valid_id_in_the_table(
    value: float, temperature: float
) -> None:
    logits = torch.zeros(3, 8)
    logits[1, 5 if value != -math.inf else slice(None)] = value
    token_ids, numbers = torch.full((3, 2), 9, dtype=torch.int32), torch.arange(3)
    arguments = (torch.full((3,), temperature), numbers, token_ids, torch.ones(3, dtype=torch.int32))
    ids = sample_and_append(logits, None, numbers, *arguments)
    assert (ids >= 0).tolist() == [True, False, True]
    assert token_ids[:, 1].tolist() == [ids[0], 0, ids[2]]


# --- tables ---


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_sampled_token_is_entered_in_its_row_and_padding_changes_nothing(device: str) -> None:
    token_ids = torch.full((5, 4), 9, dtype=torch.int32, device=device)
    context_lens = torch.tensor([1, 2, 3, 0, 0], dtype=torch.int32, device=device)
    logits, zeros = torch.eye(5, device=device)[[3, 1, 4, 2]], torch.zeros(5, device=device)
    rows = torch.tensor([2, -1, 0, -1], device=device)
    ids = sample_and_append(logits, None, rows, zeros, zeros.long(), token_ids, context_lens)
    assert ids.tolist() == [3, -1, 4, -1]
    assert token_ids[[0, 2]].tolist() == [[9, 4, 9, 9], [9, 9, 9, 3]]
    assert token_ids[[1, 3]].eq(9).all()
    assert context_lens.tolist() == [2, 2, 4, 0, 0]


def test_a_draw_takes_temperature_seed_and_position_from_its_row() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    temperatures, seeds = torch.tensor([1.0, 0.0, 5.0, 0.0]), tensor(11, 22, 33, 0)
    token_ids, context_lens = torch.zeros(4, 60, dtype=torch.int32), torch.tensor([50, 7, 9, 0]).int()
    rows = tensor(2, 0, 1)
    expected = sample(logits, temperatures[rows], seeds[rows], context_lens[rows])
    assert torch.equal(sample_and_append(logits, None, rows, temperatures, seeds, token_ids, context_lens), expected)


# --- a vocabulary split over ranks ---


def draw_together(logits: Tensor, size: int, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """What each of `size` ranks draws from its shard and the others' candidates: they must agree."""
    rows = torch.arange(len(logits))
    shards = [TensorParallel(rank, size).vocab_shard(logits.shape[1]) for rank in range(size)]
    candidates = [
        torch.stack((scores.view(torch.int32), ids))
        for start, length in shards
        for scores, ids in [
            best_candidates(logits[:, start : start + length], start, rows, temperatures, seeds, positions)
        ]
    ]
    group = SimpleNamespace(all_gather=lambda _: torch.stack(candidates))
    results = []
    for start, length in shards:
        token_ids, lens = torch.zeros(len(logits), int(positions.max()) + 1, dtype=torch.int32), positions.clone()
        shard = logits[:, start : start + length]
        draws = Draws(temperatures, seeds, token_ids, lens, None, group)
        results.append(draws.from_shards(shard, start, Lines(range(len(rows)), rows.tolist(), rows, lens)))
        assert torch.equal(token_ids[rows, positions.long()], results[-1].clamp(min=0))
        assert torch.equal(lens, positions + 1)
    assert all(torch.equal(result, results[0]) for result in results)
    return results[0]


@pytest.mark.parametrize(
    ("vocab_size", "size", "spread"), [(512, 2, 0.0), (500, 2, 5.0), (1024, 4, 1.0), (1000, 8, 1.0)]
)
def test_draws_do_not_depend_on_the_number_of_ranks(vocab_size: int, size: int, spread: float) -> None:
    logits = spread * torch.randn(300, vocab_size, generator=torch.Generator().manual_seed(0))
    temperatures = torch.tensor([0.0, 0.3, 1.0, 2.0, 100.0]).repeat(60)
    arguments = (temperatures, torch.arange(300), torch.arange(300).int() % 7)
    assert torch.equal(draw_together(logits, size, *arguments), sample(logits, *arguments))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("place", [5, 70])
def test_what_is_not_finite_on_one_rank_gives_no_token_on_any(value: float, temperature: float, place: int) -> None:
    logits = torch.zeros(4, 128)
    logits[1, place] = value
    logits[2] = value
    logits[3, :64] = -math.inf  # nothing to win on the first rank, which is no error
    ids = draw_together(logits, 2, torch.full((4,), temperature), torch.arange(4), torch.arange(4).int())
    assert (ids >= 0).tolist() == [True, value < 0, False, True]
    assert ids[3] >= 64


def test_padding_rows_draw_nothing_together() -> None:
    candidates = torch.tensor([[[0, 0], [7, 8]], [[1, 1], [70, 80]]], dtype=torch.int32)
    group = SimpleNamespace(all_gather=lambda _: candidates)
    token_ids, context_lens = torch.full((3, 4), 9, dtype=torch.int32), torch.tensor([1, 2, 0]).int()
    tables = (torch.zeros(3), torch.zeros(3).long(), token_ids, context_lens)
    draws, lines = Draws(*tables, None, group), Lines(range(2), [-1, 1], tensor(-1, 1), context_lens)
    assert draws.from_shards(torch.zeros(2, 64), 0, lines).tolist() == [-1, 80]
    assert token_ids[:2].tolist() == [[9, 9, 9, 9], [9, 9, 80, 9]]
    assert context_lens.tolist() == [1, 3, 0]
