"""The options in `speculative_config`, with vLLM's names and defaults."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from nanoinfer.errors import ConfigError, Foreigners, check_names

METHODS = ("ngram", "suffix")
DEFAULT_LOOKUP = 5
MAX_TOKENS = 63  # a decode row of 64 tokens fills the largest tile of our attention kernels
EXAMPLE = "{'method': 'suffix', 'num_speculative_tokens': 8}"
BY_TIMES = "the times of steps decide how many tokens are proposed"
LOSSLESS = "a token counts if it is the one that is drawn without proposals"
# What vLLM has beside, and the values that say what is so anyway. Most of it is about draft models.
FOREIGN: Foreigners = {
    **dict.fromkeys(("draft_model_config", "draft_parallel_config", "target_model_config", "target_parallel_config")),
    **dict.fromkeys(("max_model_len", "quantization", "revision", "code_revision", "draft_load_config")),
    **dict.fromkeys(("attention_backend", "kv_cache_dtype", "moe_backend", "speculative_token_tree")),
    "draft_tensor_parallel_size": ((1,), "there is no draft model that could be split"),
    "disable_by_batch_size": ((), BY_TIMES),
    "num_speculative_tokens_per_batch_size": ((), BY_TIMES),
    "disable_logprobs": ((False,), "log-probabilities are those without proposals"),
    "disable_padded_drafter_batch": ((False, True), "there is no draft model"),
    "enforce_eager": ((False, True), "there is no draft model"),
    "parallel_drafting": ((False,), "there is no draft model"),
    "draft_sample_method": (("greedy",), LOSSLESS),
    "rejection_sample_method": (("strict", "standard"), LOSSLESS),
    **dict.fromkeys(("acceptance_method", "posterior_threshold", "posterior_alpha"), ((), LOSSLESS)),
}


@dataclass(frozen=True, slots=True)
class SpeculativeOptions:
    """Says how tokens are proposed.

    method: "ngram" goes on as the text did where its last tokens stood before; "suffix" also looks at earlier answers
    of the engine, and counts how texts went on. num_speculative_tokens: the most tokens that are proposed for a row.
    prompt_lookup_min, prompt_lookup_max: of "ngram", how many tokens have to be equal, and how many are compared.
    suffix_decoding_max_tree_depth: of "suffix", how many are compared. suffix_decoding_max_cached_requests: how many
    answers are kept, at most; 0 for none. suffix_decoding_max_spec_factor: how many tokens are proposed for each one
    that is equal. suffix_decoding_min_token_prob: the least share of equal texts that goes on with a proposed token.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_min: int = DEFAULT_LOOKUP
    prompt_lookup_max: int = DEFAULT_LOOKUP
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

    def __post_init__(self) -> None:
        self._check_count("num_speculative_tokens", 1, MAX_TOKENS)
        for name in ("prompt_lookup_min", "prompt_lookup_max", "suffix_decoding_max_tree_depth"):
            self._check_count(name, 1)
        self._check_count("suffix_decoding_max_cached_requests", 0)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config has prompt_lookup_min={self.prompt_lookup_min}, which is more than "
                f"prompt_lookup_max={self.prompt_lookup_max}; use at most {self.prompt_lookup_max}"
            )
        self._check_number("suffix_decoding_max_spec_factor", 0.0, 1000.0, "1.0")
        self._check_number("suffix_decoding_min_token_prob", 0.0, 1.0, "0.1")

    def _check_count(self, name: str, least: int, most: int = 2**31 - 1) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ConfigError(
                f"speculative_config has {name}={value!r:.200}; use a whole number from {least} to {most}"
            )

    def _check_number(self, name: str, least: float, most: float, usual: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise ConfigError(
                f"speculative_config has {name}={value!r:.200}; use a number from {least} to {most}; {usual} is usual"
            )


NAMES = tuple(item.name for item in fields(SpeculativeOptions))


def as_speculative_config(given: Any) -> dict[str, Any] | None:
    """Return speculative_config as a dict with all of SpeculativeOptions. Raises ConfigError."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(f"speculative_config={given!r:.200} is no dict; use {EXAMPLE}, say")
    options = dict(given)
    if (model := options.pop("model", None)) is not None:
        if model not in METHODS:
            raise ConfigError(
                f"speculative_config has model={model!r:.200}, and draft models are not supported; use {EXAMPLE}, say"
            )
        options.setdefault("method", model)  # vLLM takes the name of the method there as well
    method = options.get("method")
    if method is None:
        raise ConfigError(f"speculative_config has no method; use {EXAMPLE}, say")
    if method not in METHODS:
        raise ConfigError(
            f"speculative_config has method={method!r:.200}, which nanoinfer does not have; use "
            f"{' or '.join(map(repr, METHODS))}, which need no draft model, or leave speculative_config out"
        )
    try:
        options = check_names("speculative_config", options, NAMES, FOREIGN)
    except TypeError as error:
        raise ConfigError(str(error)) from None
    options = {name: value for name, value in options.items() if value is not None}
    lookups = [options[name] for name in ("prompt_lookup_min", "prompt_lookup_max") if name in options]
    if len(lookups) == 1:
        options |= {"prompt_lookup_min": lookups[0], "prompt_lookup_max": lookups[0]}
    if method == "suffix":
        options.setdefault("num_speculative_tokens", options.get("suffix_decoding_max_tree_depth", 24))
    elif "num_speculative_tokens" not in options:
        raise ConfigError("speculative_config has no num_speculative_tokens, which 'ngram' needs; use 8, say")
    return asdict(SpeculativeOptions(**options))
