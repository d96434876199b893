"""Tells the row of a sequence what its request asks for, beside seed and temperature.

Each option is declared once, as a `RowOption`: at its field of SamplingParams, or as that of hidden states. The packet
that gives a sequence its row carries the values of the options that ask for something. The hosts of all ranks read them
back as an `AdmittedRow`.
"""

from collections.abc import Hashable, Iterable
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
# Where an adapter lies on the device, and its number: see `lora/`.
ADAPTER = RowOption(derive=lambda _, seq: seq.adapter and [seq.adapter.slot, seq.adapter.number])
ROW_OPTIONS = OF_PARAMS | {"hidden_states_request": HIDDEN_STATES, "adapter": ADAPTER}
OPTION_NAMES = [*ROW_OPTIONS]
PREFIX_OPTIONS = [item.name for item in fields(SamplingParams) if item.metadata.get("is_of_prefix")]

_read_options = attrgetter(*(f"sampling_params.{name}" for name in OF_PARAMS), "hidden_states_request", "adapter")
NOTHING_ASKED = _read_options(Sequence(0, [0], SamplingParams()))


class OptionRecord(NamedTuple):
    """Says in a packet that a row asks for something by an option."""

    row: int
    option: int  # which of OPTION_NAMES
    size: int  # numbers of its value, which follow in the packet


class AdmittedRow(NamedTuple):
    """Says which options an admitted sequence asks for."""

    row: int
    num_tokens: int
    num_prompt_tokens: int
    options: dict[str, list[float]]  # by name, the numbers of its value


def identity_of(params: SamplingParams, adapter: Hashable = None) -> Hashable:
    """Return what keys, values and states of a request depend on beside its tokens; None for its tokens alone."""
    if not PREFIX_OPTIONS:
        return adapter
    given = tuple((name, value) for name in PREFIX_OPTIONS if (value := getattr(params, name)) is not None)
    return ((*given, adapter) if adapter is not None else given) or None


def option_sections(admitted: Iterable[Sequence]) -> dict[str, list[Any]]:
    """Return the sections of a packet that say what newly admitted sequences ask for, by name."""
    records: list[tuple[int, int, int]] = []  # of OptionRecord
    values: list[float] = []
    for seq in admitted:
        if _read_options(seq) == NOTHING_ASKED:  # as of most requests
            continue
        for index, (name, option) in enumerate(ROW_OPTIONS.items()):
            value = option.value(name, seq)
            if value is not None:
                numbers = value if isinstance(value, (list, tuple)) else [value]
                records.append((seq.held_row, index, len(numbers)))
                values += numbers
    return {"option_records": records, "option_values": values}


def read_admitted_rows(on_host: Any) -> list[AdmittedRow]:
    """Return the admitted rows that ask for something. on_host: the `AllSections` of a packet."""
    if not len(on_host.option_records):
        return []
    rows = {numbers[0]: AdmittedRow._make([*numbers, {}]) for numbers in on_host.row_records[:, :3].tolist()}
    values, end = on_host.option_values.ravel().view(np.float64).tolist(), 0
    for row, index, size in on_host.option_records.tolist():
        start, end = end, end + size
        rows[row].options[OPTION_NAMES[index]] = values[start:end]
    return [row for row in rows.values() if row.options]
