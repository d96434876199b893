"""What a sequence asks for beyond its seed and temperature, on its way to whoever serves its row.

Each option is declared once, as a `RowOption`: at its field of SamplingParams, or in `OF_SEQUENCES`. The packet that
gives a sequence its row carries the values of those options that ask for something. The hosts of all ranks read them
back as an `AskingRow`.
"""

from collections.abc import Hashable, Iterable
from dataclasses import fields
from operator import attrgetter
from struct import pack, unpack
from typing import Any, NamedTuple

import numpy as np

from nanoinfer.engine.hidden_states_request import HIDDEN_STATES
from nanoinfer.engine.sequence import Sequence
from nanoinfer.option_fields import RowOption
from nanoinfer.sampling_params import SamplingParams

OF_PARAMS: dict[str, RowOption] = {
    item.name: row for item in fields(SamplingParams) if (row := item.metadata.get("row")) is not None
}
OF_SEQUENCES = {"hidden_states_request": HIDDEN_STATES}  # by their fields of Sequence
ROW_OPTIONS = OF_PARAMS | OF_SEQUENCES
NAMES, OPTIONS = [*ROW_OPTIONS], [*ROW_OPTIONS.values()]
INDICES = {name: index for index, name in enumerate(NAMES)}

PREFIX_OPTIONS = [item.name for item in fields(SamplingParams) if item.metadata.get("is_of_prefix")]

_read_options = attrgetter(*(f"sampling_params.{name}" for name in OF_PARAMS), *OF_SEQUENCES)
NOTHING_ASKED = _read_options(Sequence(0, [0], SamplingParams()))


class Asked(NamedTuple):
    """Says that a row asks for something by an option."""

    row: int
    option: int  # which of ROW_OPTIONS
    size: int  # numbers of its value, which follow in the packet


class AskingRow(NamedTuple):
    """What an admitted sequence asks for.

    asked: values by the names of options; lists of other than whole numbers are arrays.
    """

    row: int
    num_tokens: int
    num_prompt_tokens: int
    asked: dict[str, Any]


def identity_of(params: SamplingParams) -> Hashable:
    """Return what keys, values and states of a request depend on beside its tokens; None for its tokens alone."""
    given = tuple((name, value) for name in PREFIX_OPTIONS if (value := getattr(params, name)) is not None)
    return given or None


def asked_options(seq: Sequence) -> dict[str, Any]:
    """Return the values of the options by which a sequence asks for something."""
    if _read_options(seq) == NOTHING_ASKED:  # as of most requests
        return {}
    values = {name: option.value(name, seq) for name, option in ROW_OPTIONS.items()}
    return {name: value for name, value in values.items() if value is not None}


def asked_sections(asked_by_row: Iterable[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Return the sections of a packet that say what rows ask for, each given with its `asked_options`."""
    records: list[tuple[int, int, int]] = []  # of Asked
    values: list[int] = []
    for row, asked in asked_by_row:
        for name, value in asked.items():
            numbers = _to_numbers(ROW_OPTIONS[name], value)
            values += numbers
            records.append((row, INDICES[name], len(numbers)))
    return {"asked": records, "asked_values": values}


def _to_numbers(option: RowOption, value: Any) -> list[int]:
    if option.dtype == "i4":
        return value if option.is_list else [value]
    if option.is_list:
        return np.array(value, option.dtype).view(np.int32).tolist()
    return [*unpack("i", pack("f", value))]


def read_asking_rows(on_host: Any) -> list[AskingRow]:
    """Return the admitted rows that ask for something. on_host: the `HostSections` of a packet."""
    if not len(on_host.asked):
        return []
    rows = {numbers[0]: AskingRow._make([*numbers, {}]) for numbers in on_host.row_records[:, :3].tolist()}
    array = on_host.asked_values[:, 0].copy()  # the packet's memory may be used again
    floats, end = array.view(np.float32), 0
    for row, index, size in on_host.asked.tolist():
        option, start, end = OPTIONS[index], end, end + size
        if option.dtype == "i4":
            value = array[start:end].tolist() if option.is_list else array[start].item()
        else:
            value = array[start:end].view(option.dtype) if option.is_list else floats[start].item()
        rows[row].asked[NAMES[index]] = value
    return [row for row in rows.values() if row.asked]
