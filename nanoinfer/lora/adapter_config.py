"""Reads adapter_config.json of peft: which modules an adapter changes, at which rank, by how much.

An option that would change answers and is not supported raises an error that names it. Module names are matched by
peft's rules: see `check_target_module_exists` and `get_pattern_key` there.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoinfer.errors import ModelError

CONFIG_FILE = "adapter_config.json"
# Options that change no answer of a trained adapter: they say where it comes from, and how it was trained.
WITHOUT_EFFECT = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "lora_dropout", "megatron_core", "eva_config", "qalora_group_size", "runtime_config"),
    *("ensure_weight_tying", "loftq_config"),
}
# Initialisations that leave the base model's weights as they are. Old files have none.
PLAIN_INITIALISATIONS = (None, True, False, "gaussian", "eva")
MERGE = "merge the adapter into its base model with peft's merge_and_unload, and give the folder where that is saved"
NUMBERED = r".*?\.[^.]*\.(\d+)\."  # a module's name up to the index of its layer


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Holds what a config says about modules, which have their names in the base model of transformers.

    rank, alpha: for modules that no pattern names. rank_pattern, alpha_pattern: ranks and alphas by the end of a
    module's name, as a regular expression. uses_rslora: whether the factor is alpha / sqrt(rank) instead of alpha /
    rank. target_modules, exclude_modules: ends of names, or one regular expression for whole names; None: not given.
    layers: if target_modules are ends of names, the layers to which they are limited; None for all. layer_names: names
    of the module lists that hold these layers, as regular expressions.
    """

    rank: int
    alpha: float
    uses_rslora: bool
    target_modules: str | Sequence[str] | None
    exclude_modules: str | Sequence[str] | None
    layers: Sequence[int] | None
    layer_names: Sequence[str]
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    @classmethod
    def read(cls, folder: Path) -> "AdapterConfig":
        """Read the file in a folder. Raises ModelError if it is not peft's, or has an option that is not supported."""
        path = folder / CONFIG_FILE
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read ({error}); give the folder that peft has saved") from None
        if not isinstance(given, dict) or given.get("peft_type", "LORA") != "LORA":
            kind = given.get("peft_type") if isinstance(given, dict) else type(given).__name__
            raise ModelError(f"{path} has peft_type={kind!r}, and only 'LORA' is supported; {MERGE}")
        try:
            return cls._of(given)
        except (TypeError, ValueError) as error:
            raise ModelError(f"{path}: {error}") from None

    @classmethod
    def _of(cls, given: Mapping[str, Any]) -> "AdapterConfig":
        fields = {name: value for name, value in given.items() if name not in WITHOUT_EFFECT}
        initialisation = fields.pop("init_lora_weights", None)
        if initialisation not in PLAIN_INITIALISATIONS:
            raise ValueError(
                f"init_lora_weights={initialisation!r} changes the base model's weights, which is not supported; "
                "convert the adapter with peft's path_initial_model_for_weight_conversion, or merge it"
            )
        if fields.get("bias") == "none":
            del fields["bias"]
        layers = fields.pop("layers_to_transform", None)
        if not isinstance(layers, int | list | None):
            raise ValueError(f"layers_to_transform={layers!r:.100} is neither a whole number nor a list of these")
        layer_names = _names(fields.pop("layers_pattern", None), "layers_pattern") or ()
        config = cls(
            rank=_number(fields.pop("r", 8), "r"),
            alpha=_number(fields.pop("lora_alpha", 8), "lora_alpha"),
            uses_rslora=bool(fields.pop("use_rslora", False)),
            target_modules=_names(fields.pop("target_modules", None), "target_modules"),
            exclude_modules=_names(fields.pop("exclude_modules", None), "exclude_modules"),
            layers=[layers] if isinstance(layers, int) else layers or None,
            layer_names=[layer_names] if isinstance(layer_names, str) else layer_names,
            rank_pattern=_numbers(fields.pop("rank_pattern", None), "rank_pattern"),
            alpha_pattern=_numbers(fields.pop("alpha_pattern", None), "alpha_pattern"),
        )
        for names in (config.target_modules, config.exclude_modules):
            if isinstance(names, str):
                _check_expression(names)
        for part in (*config.layer_names, *config.rank_pattern, *config.alpha_pattern):
            _check_expression(f"({part})")  # as they are used, within longer expressions
        for name, value in fields.items():
            if value:  # peft writes every option of its own, the unused ones as null, false or empty
                raise ValueError(f"{name}={value!r:.100} is not supported; {MERGE}")
        return config

    def rank_of(self, module: str) -> int:
        """Return the rank of a module."""
        return int(_by_pattern(self.rank_pattern, module, self.rank))

    def factor_of(self, module: str) -> float:
        """Return the factor by which the product of a module's two matrices is multiplied."""
        rank, alpha = self.rank_of(module), float(_by_pattern(self.alpha_pattern, module, self.alpha))
        return alpha / math.sqrt(rank) if self.uses_rslora else alpha / rank

    def targets(self, module: str) -> bool:
        """Return whether the config says that the adapter changes a module."""
        excluded, target = self.exclude_modules, self.target_modules
        if excluded is not None and _matches(excluded, module):
            return False
        if target is None or target == "all-linear":
            return True
        if not _matches(target, module):
            return False
        if isinstance(target, str) or module in target or self.layers is None:
            return True
        patterns = [rf"(?:^|.*?\.){name}\.(\d+)\." for name in self.layer_names] or [NUMBERED]
        found = next(filter(None, (re.match(pattern, module) for pattern in patterns)), None)
        return found is not None and int(found[1]) in self.layers


def _matches(names: str | Sequence[str], module: str) -> bool:
    """Return whether a module's whole name matches a regular expression, or ends with one of several names."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that a module's name ends with."""
    return next((value for end, value in patterns.items() if re.match(rf"(.*\.)?({end})$", module)), default)


def _number(value: Any, name: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r} is not a number above 0")
    return value


def _numbers(value: Any, name: str) -> Mapping[str, Any]:
    """Return numbers by ends of names."""
    if not isinstance(value, dict | None):
        raise ValueError(f"{name}={value!r:.100} is no dict of numbers by ends of names")
    return {end: _number(number, f"{name}[{end!r}]") for end, number in (value or {}).items()}


def _check_expression(text: str) -> None:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r:.100} is no regular expression ({error})") from None


def _names(value: Any, name: str) -> str | Sequence[str] | None:
    if not isinstance(value, str | list | None) or (isinstance(value, list) and not all(map(_is_text, value))):
        raise ValueError(f"{name}={value!r:.100} is neither a text nor a list of texts")
    return value or None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
