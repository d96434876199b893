"""What a sequence asks for beyond its seed and temperature, on its way to whoever serves its row.

Each option is declared once, as a `RowOption`: at its field of SamplingParams, or in `ROW_OPTIONS` if it is none. The
packet that gives a sequence its row carries the values of those options that ask for something. The hosts of all ranks
read them back as an `AskingRow`.
"""

from collections.abc import Iterable
from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from nanoinfer.engine.hidden_states_request import HIDDEN_STATES
from nanoinfer.engine.sequence import Sequence
from nanoinfer.option_fields import RowOption
from nanoinfer.sampling_params import SamplingParams

OF_PARAMS: dict[str, RowOption] = {
    item.name: row for item in fields(SamplingParams) if (row := item.metadata.get("row")) is not None
}
OF_REQUESTS = {"hidden_states": HIDDEN_STATES}
ROW_OPTIONS = OF_PARAMS | OF_REQUESTS
NAMES = [*ROW_OPTIONS]
INDICES = {name: index for index, name in enumerate(NAMES)}
INT_LISTS = {name for name, option in ROW_OPTIONS.items() if option.is_list and option.dtype == "i4"}

_read_options = attrgetter(*OF_PARAMS)
NOTHING_ASKED = _read_options(SamplingParams())


class Asked(NamedTuple):
    """Says that a row asks for something by an option."""

    row: int
    option: int  # which of ROW_OPTIONS
    size: int  # numbers of its value, which follow in the packet


class AskingRow(NamedTuple):
    """What an admitted sequence asks for. asked: values by the names of options."""

    row: int
    num_tokens: int
    num_prompt_tokens: int
    asked: dict[str, Any]


def asked_options(seq: Sequence) -> dict[str, Any]:
    """Return the values of the options by which a sequence asks for something."""
    is_plain = _read_options(seq.sampling_params) == NOTHING_ASKED  # as of most requests
    options = OF_REQUESTS if is_plain else ROW_OPTIONS
    values = {name: option.value(name, seq) for name, option in options.items()}
    return {name: value for name, value in values.items() if value is not None}


def asked_sections(asked_by_row: Iterable[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Return the sections of a packet that say what rows ask for, each given with its `asked_options`."""
    records: list[tuple[int, int, int]] = []  # of Asked
    values: list[int] = []
    for row, asked in asked_by_row:
        for name, value in asked.items():
            numbers = value
            if name not in INT_LISTS:
                numbers = np.array(value, ROW_OPTIONS[name].dtype, ndmin=1).view(np.int32).tolist()
            values += numbers
            records.append((row, INDICES[name], len(numbers)))
    return {"asked": records, "asked_values": values}


def read_asking_rows(row_records: Any, asked: Any, asked_values: Any) -> list[AskingRow]:
    """Return what rows ask for, given these sections of a packet on the host."""
    rows = {numbers[0]: AskingRow._make([*numbers, {}]) for numbers in row_records[:, :3].tolist()}
    values, end = asked_values[:, 0].tolist(), 0
    for row, option, size in asked.tolist():
        name, start, end = NAMES[option], end, end + size
        value: Any = values[start:end]
        if name not in INT_LISTS:
            declared = ROW_OPTIONS[name]
            value = asked_values[start:end, 0].view(declared.dtype).tolist()
            value = value if declared.is_list else value[0]
        rows[row].asked[name] = value
    return [row for row in rows.values() if row.asked]
