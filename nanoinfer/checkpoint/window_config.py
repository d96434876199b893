"""Which layers of a config.json have a sliding window, and which know no positions."""

from collections.abc import Mapping
from typing import Any

from nanoinfer.checkpoint.config_fields import read_flag, read_number
from nanoinfer.errors import ModelError


def read_windows(
    raw: Mapping[str, Any], special: Mapping[str, Any], num_layers: int, needs_window: bool
) -> tuple[int | None, ...]:
    """Read which layers have a sliding window. special: the architecture's special fields, and their defaults."""
    none = (None,) * num_layers
    if "sliding_window" not in special or (raw.get("sliding_window") is None and not needs_window):
        return none
    if "use_sliding_window" in special and not read_flag(raw, "use_sliding_window", False):
        return none
    window = read_number(raw, "sliding_window", int)
    layer_types = raw.get("layer_types")
    if layer_types is None and "no_rope_layers" in special:
        return tuple(window if is_unrotated else None for is_unrotated in _read_no_rope_layers(raw, num_layers))
    if layer_types is None and "sliding_window_pattern" in special:
        step = read_number(raw, "sliding_window_pattern", int, special["sliding_window_pattern"])
        return tuple(window if (index + 1) % step else None for index in range(num_layers))
    if layer_types is None:
        first = raw["max_window_layers"] if "max_window_layers" in special else 0
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ModelError(f"config.json has max_window_layers={first!r}; it must be a whole number of at least 0")
        return tuple(window if index >= first else None for index in range(num_layers))
    kinds = {"sliding_attention": window, "full_attention": None}
    if not isinstance(layer_types, list) or len(layer_types) != num_layers or not kinds.keys() >= {*layer_types}:
        raise ModelError(
            f"config.json has layer_types={layer_types!r:.200}; it must name {' or '.join(kinds)} for each of "
            f"{num_layers} layers"
        )
    return tuple(kinds[kind] for kind in layer_types)


def read_unrotated(
    raw: Mapping[str, Any],
    special: Mapping[str, Any],
    windows: tuple[int | None, ...],
    rotates_windows_alone: bool,
) -> tuple[bool, ...]:
    """Read which layers know no positions."""
    if rotates_windows_alone and raw.get("sliding_window") is not None:
        return tuple(window is None for window in windows)
    if "no_rope_layers" in special:
        return _read_no_rope_layers(raw, len(windows))
    return (False,) * len(windows)


def _read_no_rope_layers(raw: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Return which layers have 0 in `no_rope_layers`."""
    layers = raw.get("no_rope_layers")
    if layers is None:
        interval = read_number(raw, "no_rope_layer_interval", int)
        return tuple((index + 1) % interval == 0 for index in range(num_layers))
    if not isinstance(layers, list) or len(layers) != num_layers or not all(layer in (0, 1) for layer in layers):
        raise ModelError(
            f"config.json has no_rope_layers={layers!r:.200}; it must have 1, or 0 for no positions, for each of "
            f"{num_layers} layers"
        )
    return tuple(not layer for layer in layers)
