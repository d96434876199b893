"""The sampler: Philox against its published answers, the noise, and the distribution of the draws."""

import math

import pytest
import torch
from torch import Tensor

from nanoinfer.layers import sampler
from nanoinfer.layers.sampler import gumbel_noise, philox, sample, sample_torch

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


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((MASK32,) * 4, (MASK32,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_reference_gives_the_known_answers_of_random123(
    counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]
) -> None:
    assert philox_in_python(counter, key) == answer


def test_philox_gives_the_known_answer_for_zeros() -> None:
    numbers = philox(tensor(0), tensor(0), tensor(0))
    assert [hex(number.item()) for number in numbers] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


@pytest.mark.parametrize("seed", [0, 1, -1, MASK32, 2**32, 2**63 - 1, -(2**63), 0x299F31D0A4093822])
@pytest.mark.parametrize("counter", [(0, 0), (1, 0), (0, 1), (38000, 131071), (MASK32, MASK32)])
def test_philox_equals_the_reference(seed: int, counter: tuple[int, int]) -> None:
    numbers = philox(tensor(seed), tensor(counter[0]), tensor(counter[1]))
    key = (seed & MASK32, (seed >> 32) & MASK32)
    assert tuple(number.item() for number in numbers) == philox_in_python((*counter, 0, 0), key)


def test_philox_broadcasts_seeds_against_counters() -> None:
    together = philox(tensor(3, 4).unsqueeze(1), tensor(0, 1, 2), tensor(5, 6).unsqueeze(1))
    assert together[0].shape == (2, 3)
    alone = philox(tensor(4), tensor(2), tensor(6))
    assert [numbers[1, 2] for numbers in together] == [numbers[0] for numbers in alone]


# --- noise ---


def test_neighbouring_ids_share_one_call_of_philox() -> None:
    noise = gumbel_noise(tensor(7), tensor(5), vocab_size=6)
    numbers = [*philox_in_python((0, 5, 0, 0), (7, 0)), *philox_in_python((1, 5, 0, 0), (7, 0))[:2]]
    expected = [-math.log(-math.log1p(-(number + 0.5) / 2**32)) for number in numbers]
    assert noise.squeeze(0).tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 5])
def test_a_smaller_vocabulary_sees_the_first_of_the_same_noise(vocab_size: int) -> None:
    noise = gumbel_noise(tensor(7), tensor(5), vocab_size)
    assert torch.equal(noise, gumbel_noise(tensor(7), tensor(5), 8)[:, :vocab_size])


def test_the_noise_has_the_mean_and_the_variance_of_a_gumbel_distribution() -> None:
    noise = gumbel_noise(tensor(0, 1, 2, 3), tensor(9, 9, 9, 9), vocab_size=50000).double()
    # The mean of 200,000 draws is good to 1.28 / sqrt(200,000), about 0.003.
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)


@pytest.mark.parametrize("bits", [0, 1, 2**31, MASK32 - 255, MASK32 - 1, MASK32])
def test_the_noise_is_finite_for_any_bits(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def constant(seed: Tensor, counter0: Tensor, counter1: Tensor) -> tuple[Tensor, ...]:
        shape = torch.broadcast_shapes(seed.shape, counter0.shape, counter1.shape)
        return tuple(torch.full(shape, bits) for _ in range(4))

    monkeypatch.setattr(sampler, "philox", constant)
    noise = gumbel_noise(tensor(0), tensor(0), vocab_size=8)
    assert noise.isfinite().all()
    uniform = min((bits + 0.5) / 2**32, 1 - 2**-24)
    assert noise[0, 0].item() == pytest.approx(-math.log(-math.log1p(-uniform)), rel=1e-5, abs=1e-5)


def test_the_smallest_numbers_give_different_noise_and_the_smallest_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """The winners' noise: log(1 - u) written plainly would be 0 for all of these."""
    monkeypatch.setattr(sampler, "philox", lambda *counters: tuple(tensor(bits).view(1, 1) for bits in (0, 1, 2, 100)))
    noise = gumbel_noise(tensor(0), tensor(0), vocab_size=4)
    assert noise.squeeze(0).tolist() == pytest.approx([22.87, 21.77, 21.26, 17.57], abs=0.01)


# --- draws ---


def test_temperature_0_takes_the_best() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [-5.0, -7.0, -6.0]])
    assert sample(logits, torch.zeros(2), tensor(1, 2), tensor(3, 4)).tolist() == [1, 0]


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    assert sample(logits, torch.zeros(2), tensor(1, 2), tensor(3, 4)).tolist() == [1, 0]


def test_the_ids_are_int32() -> None:
    assert sample(torch.zeros(3, 4), torch.ones(3), tensor(0, 1, 2), tensor(0, 0, 0)).dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_logits_are_left_as_they_were(dtype: torch.dtype) -> None:
    logits = torch.arange(8, dtype=dtype).view(2, 4)
    sample(logits, torch.tensor([1.0, 0.0]), tensor(1, 2), tensor(3, 4))
    assert torch.equal(logits, torch.arange(8, dtype=dtype).view(2, 4))


CRITICAL_VALUE = 24.3  # of chi-square with 7 degrees of freedom at 0.1%
EIGHT_LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, 0.7])


def chi_square(ids: Tensor, probabilities: Tensor) -> float:
    expected = len(ids) * probabilities
    counts = torch.bincount(ids, minlength=len(probabilities))
    return ((counts - expected) ** 2 / expected).sum().item()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_over_seeds_follow_the_softmax(temperature: float) -> None:
    seeds = torch.arange(20000)
    ids = draw(EIGHT_LOGITS, temperature, seeds, torch.zeros_like(seeds))
    assert chi_square(ids, (EIGHT_LOGITS / temperature).softmax(dim=0)) < CRITICAL_VALUE


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_over_positions_follow_the_softmax(temperature: float) -> None:
    positions = torch.arange(20000)
    ids = draw(EIGHT_LOGITS, temperature, torch.full_like(positions, 12345), positions)
    assert chi_square(ids, (EIGHT_LOGITS / temperature).softmax(dim=0)) < CRITICAL_VALUE


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
    seeds, positions = tensor(0, 1, 0, 2**32), tensor(0, 0, 1, 0)
    ids = draw(flat, 1.0, seeds, positions).tolist()
    assert len(set(ids)) == 4
    assert draw(flat, 1.0, seeds, positions).tolist() == ids


def test_the_upper_half_of_a_seed_counts() -> None:
    low = gumbel_noise(tensor(5), tensor(0), vocab_size=8)
    high = gumbel_noise(tensor(5 + (1 << 40)), tensor(0), vocab_size=8)
    assert not torch.equal(low, high)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_what_has_a_logit_of_minus_infinity_is_never_drawn(temperature: float) -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, -50.0, -math.inf])
    seeds = torch.arange(2000)
    ids = draw(logits, temperature, seeds, torch.zeros_like(seeds))
    assert set(ids.tolist()) <= {1, 3}


def test_a_tiny_temperature_takes_the_best_and_a_huge_one_takes_any() -> None:
    seeds = torch.arange(2000)
    assert set(draw(EIGHT_LOGITS, 1e-6, seeds, seeds).tolist()) == {0}
    assert chi_square(draw(EIGHT_LOGITS, 1e6, seeds, seeds), torch.full((8,), 1 / 8)) < CRITICAL_VALUE


def test_on_a_cpu_the_specification_is_what_runs() -> None:
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    arguments = (torch.ones(3), tensor(1, 2, 3), tensor(4, 5, 6).int())
    assert torch.equal(sample(logits.clone(), *arguments), sample_torch(logits.clone(), *arguments))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_best_gives_no_token(value: float, temperature: float) -> None:
    logits = torch.zeros(3, 8)
    logits[1, 5] = value
    if value < 0:
        logits[1] = value
    ids = sample(logits, torch.full((3,), temperature), torch.arange(3), torch.arange(3, dtype=torch.int32))
    assert (ids >= 0).tolist() == [True, False, True]
