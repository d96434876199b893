"""lm-evaluation-harness: `NanoinferLM` for `simple_evaluate`, and its command line with `--model nanoinfer`.

    python -m nanoinfer.integrations.lm_eval --model nanoinfer --model_args pretrained=Qwen/Qwen3-8B --tasks gsm8k

The harness finds models in a registry of its process, and reads no entry points of other packages. So importing this
module registers the name; run as a program, the module then runs the command `lm_eval`. Arguments, truncation and stop
strings are those of the harness's own vLLM backend (lm_eval/models/vllm_causallms.py). What the model's
generation_config.json says counts as it does for the harness's hf model.
"""

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from nanoinfer import LLM, ConfigError, LoRARequest, RequestError, SamplingParams
from nanoinfer.checkpoint.hub import read_json, resolve_model_folder
from nanoinfer.config import EngineConfig
from nanoinfer.constraints.thoughts import find_thoughts
from nanoinfer.errors import check_names
from nanoinfer.vllm_names import LLM_NAMES

try:
    from jinja2 import TemplateError
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import model_registry
    from lm_eval.models.utils import (
        handle_stop_sequences,
        has_bos_prefix,
        maybe_truncate,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(
        f"lm-evaluation-harness cannot be imported ({error}); in a clone of nanoinfer, pip install -e '.[lm-eval]'"
    ) from error

logger = logging.getLogger("nanoinfer")

# What transformers' generate takes from generation_config.json where a task does not say, by our name; the first two
# always, the others where tokens are sampled. Its own default of top_k is 50.
FOLLOWED = {"repetition_penalty": "repetition_penalty", "min_new_tokens": "min_tokens"}
FOLLOWED_IN_SAMPLING = ("top_k", "top_p", "min_p")
# What else generate would follow, with the values that ask for nothing.
NOT_FOLLOWED: dict[str, Any] = {
    **dict.fromkeys(("num_beams", "encoder_repetition_penalty", "guidance_scale", "typical_p"), 1),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha"), 0),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "stop_strings")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
}

TokenIds = list[int]
Result = TypeVar("Result")
Pair = tuple[Any, TokenIds, TokenIds]  # what a result is cached by, then token ids of a context and of what follows it


class NanoinferLM(TemplateLM):  # type: ignore[misc]  # the harness is untyped here
    """Runs the requests of the harness on nanoinfer.

    pretrained, options: as for `LLM`.
    max_length: the same as its max_model_len; longer contexts lose their first tokens.
    truncation_side: what the contexts of generate_until lose instead: "right" or "middle".
    max_gen_toks: tokens to generate where a task does not say.
    add_bos_token: whether to encode with special tokens; if not given, as the tokenizer does.
    prefix_token_id: stands before a text that has no context; if not given, BOS, or else EOS.
    enable_thinking, chat_template_args: for the chat template.
    think_end_token: the answer is what comes after its last occurrence; if not given, with enable_thinking, it is that
        of the model's family.
    lora_local_path: the folder of a LoRA adapter of peft, which answers in the place of the model alone.
    device: as for `LLM`; but "cuda:0", which the harness's command passes by default, is the CPU where there is no GPU.
    batch_size, max_batch_size: ignored, because the engine fills its batches itself; see max_num_seqs.

    Raises ConfigError for options that contradict each other, and what `LLM` raises.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        max_length: int | None = None,
        max_model_len: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        truncation_side: str = "left",
        enable_thinking: bool | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        think_end_token: str | None = None,
        lora_local_path: str | None = None,
        device: str = "auto",
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        own = [name for name in inspect.signature(NanoinferLM).parameters if name != "options"]
        options = check_names("NanoinferLM", options, [*own, *(item.name for item in fields(EngineConfig))], LLM_NAMES)
        if max_length is not None and max_model_len is not None:
            raise ConfigError(
                f"max_length={max_length} and max_model_len={max_model_len} are the same; give one of them"
            )
        if truncation_side not in ("left", "right", "middle"):
            raise ConfigError(f"truncation_side={truncation_side!r} is not known; use left, right or middle")
        device = "auto" if device == "cuda:0" else device  # the same GPU, if there is one
        self._adapter = None if lora_local_path is None else LoRARequest("adapter", 1, lora_local_path)
        options = ({} if self._adapter is None else {"enable_lora": True}) | options
        self.llm = LLM(pretrained, max_model_len=max_length or max_model_len, device=device, **options)
        self.tokenizer = self.llm.tokenizer
        if self.tokenizer is None:
            raise ConfigError(f"{pretrained} has no tokenizer, and tasks are texts; name one with tokenizer=...")
        config = self.llm.config
        if enable_thinking and think_end_token is None:
            processor = self.llm.preparer.prompt_processor
            thoughts = find_thoughts(config, processor.tokenizer, processor.vocab_size)
            if thoughts is None:
                raise ConfigError("enable_thinking=True needs think_end_token, such as '</think>', to find the answers")
            think_end_token = (b"".join(thoughts.answer) or thoughts.end).decode()
        folder = resolve_model_folder(config.model, False, revision=config.revision, download_dir=config.download_dir)
        self._generation_config: Mapping[str, Any] = read_json(folder / "generation_config.json")
        self.max_gen_toks = max_gen_toks
        self.batch_size = "auto"
        self._add_bos_token, self._prefix_token_id = add_bos_token, prefix_token_id
        self._truncation_side, self._think_end_token = truncation_side, think_end_token
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._chat_template_args = {**thinking, **(chat_template_args or {})}

    def close(self) -> None:
        """Free the model and the cache; closing twice is fine."""
        self.llm.close()

    @property
    def max_length(self) -> int:
        """Return how many tokens a prompt and its completion have at most."""
        return self.llm.max_model_len

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Return the token that stands before a text that has no context."""
        given = (self._prefix_token_id, self.tokenizer.bos_token_id)
        return next((int(token_id) for token_id in given if token_id is not None), self.eot_token_id)

    @property
    def tokenizer_name(self) -> str:
        """Return the model's name, by which requests are cached."""
        return self.llm.config.model.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation; without a generation prompt, its last message is left open to go on."""

        def render(messages: list[dict[str, str]]) -> str:
            ends = {
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": not add_generation_prompt,
            }
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **ends, **self._chat_template_args))

        try:
            return render(chat_history)
        except TemplateError:
            logger.warning("the chat template refuses a conversation, which is tried again without the system message")
            return render([message for message in chat_history if message["role"] != "system"])

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> TokenIds:
        """Return the token ids of a text; one that begins with BOS, as chat templates write it, gets no second one."""
        if add_special_tokens is None:
            add_special_tokens = self._add_bos_token
            if has_bos_prefix(string, self.tokenizer.decode([self.prefix_token_id])):
                add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids: TokenIds = self.tokenizer(string, verbose=False, **special)["input_ids"]
        return ids

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, in windows of at most `max_length` tokens."""
        pairs: list[Pair] = []
        counts = []  # windows of the texts up to each one
        for (text,) in (request.args for request in requests):
            # One token of max_length is for the context, and one for the completion that every request has.
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length - 2, 1)
            pairs += [(None, *make_disjoint_window(window)) for window in windows]
            counts.append(len(pairs))
        totals = [total for total, _ in self._loglikelihood_tokens(pairs, disable_tqdm)]
        results = [sum(totals[start:end]) for start, end in zip([0, *counts], counts, strict=False)]
        return self._cached("loglikelihood_rolling", [request.args for request in requests], results)

    def _loglikelihood_tokens(self, requests: Sequence[Pair], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding would write it."""
        pairs = [self._fit(context, continuation) for _, context, continuation in requests]
        contexts, continuations = [context for context, _ in pairs], [continuation for _, continuation in pairs]
        options: dict[str, Any] = {"use_tqdm": not disable_tqdm, "lora_request": self._adapter}
        scores = self.llm.score(contexts, continuations, **options) if pairs else []
        results = [(score.total, score.is_greedy) for score in scores]
        return self._cached("loglikelihood", [key for key, _, _ in requests], results)

    def _cached(self, kind: str, keys: list[Any], results: list[Result]) -> list[Result]:
        """Return results, which the harness caches by their keys; None: not by itself."""
        for key, result in zip(keys, results, strict=True):
            if key is not None:
                self.cache_hook.add_partial(kind, key, result)
        return results

    def _fit(self, context: TokenIds, continuation: TokenIds) -> tuple[TokenIds, TokenIds]:
        """Drop what is too long from the left, down to one token of context."""
        limit = self.max_length - 1
        num_tokens = len(context) + len(continuation)
        if num_tokens <= limit:
            return context, continuation
        logger.warning("%d tokens exceed max_length=%d - 1; the first ones are dropped", num_tokens, self.max_length)
        kept = (context + continuation)[-limit:]
        num_context = max(1, limit - len(continuation))
        return kept[:num_context], kept[num_context:]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return what the model says to each context, up to a stop string of its task."""
        if not requests:
            return []
        eos = self.tokenizer.decode([self.eot_token_id])
        all_options = [
            normalize_gen_kwargs(request.args[1], default_max_gen_toks=self.max_gen_toks) for request in requests
        ]
        stops = [[*filter(None, handle_stop_sequences(options.pop("until"), eos))] for options in all_options]
        prompts, params = [], []
        for request, options, stop in zip(requests, all_options, stops, strict=True):
            prompt, max_tokens = self._truncate(self.tok_encode(request.args[0]), options.pop("max_gen_toks"))
            prompts.append(prompt)
            # Stop strings of the task may be anywhere in what the model thinks.
            ends, most = [eos] if self._think_end_token else stop, self.max_length - len(prompt)
            params.append(sampling_params(options, max_tokens, ends, self._generation_config, prompt, most))
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm, lora_request=self._adapter)
        texts = [
            # In two calls, because lm-eval 0.4.10 would look for stop strings before it drops what is thought.
            postprocess_generated_text(postprocess_generated_text(output.text, None, self._think_end_token), stop, None)
            for output, stop in zip(outputs, stops, strict=True)
        ]
        return self._cached("generate_until", [request.args for request in requests], texts)

    def _truncate(self, prompt: TokenIds, max_tokens: int) -> tuple[TokenIds, int]:
        """Shorten a prompt so that `max_tokens` fit behind it. Raises RequestError where they leave it no room."""
        if max_tokens >= self.max_length:
            raise RequestError(f"max_gen_toks={max_tokens} leaves no room in max_length={self.max_length}; lower it")
        kept: tuple[TokenIds, int] = maybe_truncate(prompt, max_tokens, self.max_length, side=self._truncation_side)
        return kept


def sampling_params(
    options: dict[str, Any],
    max_tokens: int,
    stop: list[str],
    generation_config: Mapping[str, Any],
    prompt: TokenIds,
    most: int,
) -> SamplingParams:
    """Return the sampling parameters of a request as the harness's hf model would have them.

    options: what the harness calls generation arguments. max_tokens: the task's; max_new_tokens of generation_config
    goes before, as in transformers, up to `most`. Raises RequestError for what generate of transformers would take from
    generation_config.json, and nanoinfer does not serve.
    """
    said = {name: value for name, value in generation_config.items() if value is not None}
    for name, value in said.items():
        if name in NOT_FOLLOWED and name not in options and value not in (NOT_FOLLOWED[name], [], {}):
            raise RequestError(
                f"generation_config.json has {name}={value!r}, which the hf model follows and nanoinfer does not; take "
                "it out there, or evaluate with the hf model"
            )
    is_sampled = options.pop("do_sample")
    followed = {ours: said[name] for name, ours in FOLLOWED.items() if name in said}
    if is_sampled:
        followed |= {"top_k": 50, **{name: said[name] for name in FOLLOWED_IN_SAMPLING if name in said}}
    else:
        options = {**options, "temperature": 0.0}
    max_tokens = min(said.get("max_new_tokens", max_tokens), most)
    options = {"skip_special_tokens": False, "spaces_between_special_tokens": False, **followed, **options}
    if size := options.pop("no_repeat_ngram_size", said.get("no_repeat_ngram_size", 0)):
        options["logits_processors"] = [NoRepeatedNgrams(size, prompt)]
    options["min_tokens"] = min(options.get("min_tokens", 0), max_tokens)
    return SamplingParams(max_tokens=max_tokens, stop=stop, **options)


@dataclass(frozen=True, slots=True)
class NoRepeatedNgrams:
    """Forbids tokens that would complete an n-gram which prompt or completion has already, as transformers does.

    A logits processor: it takes the completion so far, and logits (vocab_size,).
    """

    size: int
    prompt: TokenIds

    def __call__(self, token_ids: TokenIds, logits: Any) -> Any:
        ids = self.prompt + token_ids
        last = ids[len(ids) - self.size + 1 :]
        begins = range(len(ids) - self.size + 1)
        forbidden = [ids[begin + self.size - 1] for begin in begins if ids[begin : begin + self.size - 1] == last]
        logits[forbidden] = -float("inf")
        return logits


# As text, so that `python -m` registers the class of the imported module, and not one of __main__ beside it.
model_registry.register("nanoinfer", target="nanoinfer.integrations.lm_eval:NanoinferLM")

if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
