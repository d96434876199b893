"""The likeliest proposals of all rows get the lines of a step."""

from random import Random
from typing import NamedTuple

import pytest

from nanoinfer.speculation.controller import Size
from nanoinfer.speculation.offers import Kind, Offers


class Row(NamedTuple):
    draft: list[int]
    kind: Kind


def draw(rng: Random, num_rows: int) -> tuple[list[Row | None], dict[Kind, list[float]]]:
    """Rows of five kinds, some without a draft, and chances that fall with each proposal."""
    chances = {}
    for kind in ((0, number, 8) for number in range(5)):
        drawn = sorted((rng.random() for _ in range(rng.randint(1, 8))), reverse=True)
        chances[kind] = drawn
    rows: list[Row | None] = []
    for number in range(num_rows):
        kind = rng.choice([*chances])
        rows.append(rng.choice([None, Row([], kind), *[Row([*range(100 * number, 100 * number + 8)], kind)] * 4]))
    return rows, {
        kind: its for kind, its in chances.items() if any(row and row.draft and row.kind == kind for row in rows)
    }


@pytest.mark.parametrize("num_rows", [17, 100, 128, 200, 256])
def test_packed_steps_are_filled_with_the_likeliest_proposals_of_all_rows(num_rows: int) -> None:
    rng = Random(num_rows)
    for _ in range(10):
        rows, chances = draw(rng, num_rows)
        offers = Offers(rows, num_rows, chances, [1, 2, 4, 8], packs=True)
        drafted = [row for row in rows if row and row.draft]
        ranked = sorted((chance for row in drafted for chance in chances[row.kind]), reverse=True)
        step = 128 if num_rows <= 128 else 256
        assert [size.num_lines % step for size in offers.sizes] == [0] * len(offers.sizes)
        assert offers.sizes[-1].num_lines - step < num_rows + len(ranked) <= offers.sizes[-1].num_lines
        for size in offers.sizes:
            num_free = size.num_lines - num_rows
            assert size.num_right == pytest.approx(sum(ranked[:num_free]))
            proposed = offers.take(size)
            assert sum(map(len, proposed)) == min(num_free, len(ranked))
            taken = []
            for row, ids in zip(rows, proposed, strict=True):
                assert ids == (row.draft[: len(ids)] if row else [])
                taken += chances[row.kind][: len(ids)] if row and ids else []
            assert sorted(taken, reverse=True) == ranked[:num_free]


def test_padded_steps_have_as_many_lines_for_each_row() -> None:
    a, b = Row([1, 2, 3], (0, 9, 3)), Row([4], (0, 1, 1))
    offers = Offers([a, None, b, a], 4, {a.kind: [0.9, 0.8, 0.7], b.kind: [0.5]}, [1, 2, 4, 8], packs=False)
    assert offers.sizes == [Size(8, pytest.approx(2.3)), Size(12, pytest.approx(3.9)), Size(20, pytest.approx(5.3))]
    assert offers.take(offers.sizes[1]) == [[1, 2], [], [4], [1, 2]]


@pytest.mark.parametrize("packs", [False, True])
def test_a_few_rows_stand_for_all(packs: bool) -> None:
    row = Row([1, 2], (0, 9, 2))
    [*_, size] = Offers([row, None], 64, {row.kind: [0.5, 0.25]}, [1, 2], packs).sizes
    assert size.num_right == pytest.approx(32 * 0.75)


def test_nothing_is_offered_where_nothing_is_likely() -> None:
    row = Row([1, 2], (0, 9, 2))
    for packs in (False, True):
        assert Offers([row], 64, {row.kind: []}, [1, 2], packs).sizes == []
