"""Turns prompts into token ids, and finds what is wrong with them and their options before any is queued."""

import marshal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from nanoinfer.errors import RequestError, check_names
from nanoinfer.option_fields import is_whole_number
from nanoinfer.outputs import CompletionOutput, RequestOutput, shown
from nanoinfer.sampling_params import LOGPROBS, SamplingParams, check_against_model
from nanoinfer.text.arguments import Errors, Prompt, report, results_by_prompt
from nanoinfer.text.image_parts import IMAGE_PROMPT_FIELDS, ImagePrompt, ImageTexts
from nanoinfer.text.tokenizer import Tokenizer, keep_last

LIST_HEADER = 5  # bytes that marshal writes before the items of a list
MARSHALLED_INT = np.dtype([("letter", "S1"), ("value", "<i4")])
TOKENIZATION_OPTIONS = ("truncate_prompt_tokens", "add_special_tokens")
NEED_TOKENIZER = {
    "stop": "use stop_token_ids",
    "bad_words": "use logit_bias",
    "structured_outputs": "use allowed_token_ids",
}


@dataclass(slots=True, kw_only=True)
class PreparedRequest:
    """Holds a request that was checked and is ready to be queued, or that ends at once with `error`."""

    prompt: str | None  # None if it was given as token ids
    token_ids: list[int]
    sampling_params: SamplingParams
    packed_ids: bytes | None = None  # the token ids as int32, where they were packed to be checked
    priority: int = 0  # higher runs first
    prompt_logprobs_start: int = 1  # the first prompt token whose log-probability is wanted, if any are
    constraint: Any = None  # a CompiledConstraint: what else limits its tokens
    adapter: Any = None  # an Adapter of `lora/` that its model's layers add
    hidden_states_request: Any = None  # HiddenStatesRequest: what is wanted of its prompt's hidden states
    error: RequestError | None = None
    images: tuple[Any, ...] = ()  # ProcessedImages, in the order of the prompt

    @property
    def first_prompt_logprob(self) -> int | None:
        """Return the first prompt token whose log-probability is wanted; None if none is."""
        start = self.prompt_logprobs_start
        is_wanted = self.sampling_params.prompt_logprobs is not None and start < len(self.token_ids)
        return start if is_wanted else None

    def refusal(self, request_id: int) -> Any:
        """Return the output of a request with an error, which every sample of it has."""
        assert self.error is not None, "only what has an error is refused"
        text, kind = str(self.error), self.error.kind
        samples = [
            CompletionOutput(sample, "", [], "error", error=text, error_kind=kind)
            for sample in range(self.sampling_params.n)
        ]
        output = RequestOutput(request_id, self.prompt, prompt_token_ids=[], num_cached_tokens=0, outputs=samples)
        states = self.hidden_states_request
        return output if states is None else states.to_output(output)


class EncodedPair(NamedTuple):
    """Holds the token ids of a prompt and of its completion, which was checked."""

    prompt: list[int]
    completion: list[int]
    whole: list[int]  # both
    packed_ids: bytes | None  # both as int32, where they were packed to be checked
    images: tuple[Any, ...] = ()  # ProcessedImages of the prompt


class ImageReader(Protocol):
    """Types the processor of prompts' images: the ImageReader of images/image_reader.py."""

    image_texts: ImageTexts
    num_workers: int  # threads

    def read(
        self, prompts: Mapping[int, Prompt], add_special_tokens: bool, longest_text: int, errors: Errors
    ) -> tuple[dict[int, Prompt], dict[int, tuple[Any, ...]]]:
        """Return prompts with token ids in place of those with images, and the processed images, both by index."""

    def has_room(self, num_images: int) -> bool:
        """Return whether host memory is meant to hold so many more images."""

    def close(self) -> None:
        """Let go of the threads, and of the memory of images that are kept."""


class PromptProcessor:
    """Turns prompts into token ids, and checks that the model can serve them.

    tokenizer: None where the model has none; prompts must then be token ids. model: its name, for messages.
    stop_token_ids: the model's own. max_logprobs: the engine's option. min_new_tokens: room that prompts leave for a
    completion. refusal_reason: why the model completes none; None if it does. limit: the option that sets
    max_model_len, for messages. image_reader: None where prompts have no images. Any thread may call any method.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        model: str,
        vocab_size: int,
        max_model_len: int,
        stop_token_ids: frozenset[int] = frozenset(),
        max_logprobs: int = -1,
        min_new_tokens: int = 1,
        refusal_reason: str | None = None,
        limit: str = "max_model_len",
        image_reader: ImageReader | None = None,
    ) -> None:
        self.tokenizer, self.image_reader = tokenizer, image_reader
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.longest_prompt = max_model_len - min_new_tokens
        self._refusal_reason, self._limit = refusal_reason, limit
        self._model = model
        self.stop_token_ids = stop_token_ids
        self._max_logprobs = max_logprobs

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises RequestError where the model has none."""
        if self.tokenizer is None:
            raise RequestError(
                f"{self._model} has no tokenizer; give the prompt as a list of token ids, or name a tokenizer to LLM"
            )
        return self.tokenizer

    @property
    def longest_text(self) -> int:
        """How many characters a text of max_model_len tokens has at most."""
        return self.max_model_len * self.require_tokenizer().longest_token

    def prepare(
        self,
        prompts: Mapping[int, Prompt],
        all_params: Sequence[SamplingParams],
        priorities: Sequence[int],
        errors: Errors,
        add_special_tokens: bool = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        are_shared: bool = False,
    ) -> dict[int, PreparedRequest]:
        """Return a request for each of some prompts, without constraint; add to `errors` what is wrong with them.

        prompts: by their index among those of the call, which `all_params` and `priorities` are of. are_shared: whether
        all prompts of the call have the same parameters.
        """
        self.check_completes()
        given = {index: all_params[index] for index in prompts}
        served: dict[int, SamplingParams | RequestError] = {}  # by the id of what was given
        for one in given.values():
            if id(one) not in served:
                try:
                    served[id(one)] = self.check_params(one)
                except RequestError as error:
                    served[id(one)] = error
        checked = given | results_by_prompt(served, given, errors, are_shared)
        images: dict[int, tuple[Any, ...]] = {}
        filled = prompts
        if self.image_reader is not None:
            filled, images = self.image_reader.read(prompts, add_special_tokens, self.longest_text, errors)
        encoded, packed = self.encode(filled, errors, add_special_tokens, "prompt", tokenization_kwargs)
        for index in images.keys() - errors.keys():
            if len(encoded[index]) < len(filled[index]):  # type: ignore[arg-type]  # token ids
                errors[index] = RequestError(
                    f"prompt {index} has images, and truncate_prompt_tokens would cut it; shorten its text"
                )
        return {
            index: PreparedRequest(
                prompt=prompt if isinstance(prompt, str) else text_beside_images(prompt),
                token_ids=encoded[index],
                images=images.get(index, ()),
                packed_ids=packed.get(index),
                sampling_params=checked[index],
                priority=priorities[index],
            )
            for index, prompt in prompts.items()
        }

    def encode(
        self,
        prompts: Mapping[int, Prompt],
        errors: Errors,
        add_special_tokens: bool = True,
        what: str = "prompt",
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[dict[int, list[int]], dict[int, bytes]]:
        """Return the token ids of each prompt, checked, and those of most as int32, both by index.

        What is wrong is added to `errors`; a prompt that has an error gets no ids. what: the word for a prompt in
        error messages. tokenization_kwargs: of TOKENIZATION_OPTIONS.
        """
        options = tokenization_kwargs or {}
        check_names("tokenization_kwargs", options, TOKENIZATION_OPTIONS, {})
        add_special_tokens = options.get("add_special_tokens", add_special_tokens)
        max_tokens = self.most_tokens(options.get("truncate_prompt_tokens"))
        given = self._tokenize(prompts, add_special_tokens, max_tokens, errors)
        all_ids: dict[int, list[int]] = {}
        packed: dict[int, bytes] = {}
        for index, ids in given.items():
            if index not in errors:
                all_ids[index] = list(ids) if isinstance(ids, (list, tuple)) else ids  # those given are the user's
                if (written := pack_ids(all_ids[index])) is not None:
                    packed[index] = written
        self._drop_unserved(packed)
        for index in all_ids.keys() - packed.keys():  # each has to be looked at
            try:
                all_ids[index] = self._check_token_ids(all_ids[index], f"{what} {index}")
            except RequestError as error:
                errors[index] = error
        return {index: [] if index in errors else all_ids[index] for index in prompts}, packed

    def _drop_unserved(self, packed: dict[int, bytes]) -> None:
        """Take out the prompts with ids outside the vocabulary, and those that are too long."""
        if packed:
            lengths = np.array([*map(len, packed.values())]) // 4
            ids, starts = np.frombuffer(b"".join(packed.values()), np.int32), np.cumsum(lengths) - lengths
            lowest, highest = np.minimum.reduceat(ids, starts), np.maximum.reduceat(ids, starts)
            fits = (lowest >= 0) & (highest < self.vocab_size) & (lengths <= self.longest_prompt)
            for index in np.array([*packed])[~fits].tolist():
                del packed[index]

    def _tokenize(
        self, prompts: Mapping[int, Prompt], add_special_tokens: bool, max_tokens: int | None, errors: Errors
    ) -> dict[int, list[int]]:
        """Encode the prompts that are texts, in one batch; of each, and of the others, keep the last `max_tokens`.

        What is wrong with texts is added to `errors`; they get no ids.
        """
        texts = {index: text for index, text in prompts.items() if isinstance(text, str) and index not in errors}
        encoded: dict[int, list[int]] = {}
        if texts:
            tokenizer = self.require_tokenizer()
            longest = self.longest_text if max_tokens is None else sys.maxsize
            errors |= find_bad_texts(texts, longest)
            texts = {index: text for index, text in texts.items() if index not in errors}
            try:
                distinct = [*dict.fromkeys(texts.values())]  # a task's contexts and a trainer's prompts come repeatedly
                ids = dict(zip(distinct, tokenizer.encode(distinct, add_special_tokens, max_tokens), strict=True))
                encoded = {index: ids[text] for index, text in texts.items()}
            except RequestError:  # of one of them
                for index, text in texts.items():
                    try:
                        [encoded[index]] = tokenizer.encode([text], add_special_tokens, max_tokens)
                    except RequestError as error:
                        errors[index] = error.within(f"prompt {index}")
        return {
            index: encoded.get(index, [])
            if isinstance(prompt, str)
            else keep_last(cast("list[int]", prompt), max_tokens)
            for index, prompt in prompts.items()
        }

    def encode_pairs(
        self, prompts: Mapping[int, Prompt], completions: Sequence[Prompt], errors: Errors
    ) -> dict[int, EncodedPair]:
        """Return the token ids of some prompts and of their completions, as the model reads them one after the other.

        Two texts are tokenized as one; see `split_whole`. What is wrong with a pair is added to `errors`.
        """
        self.check_completes()
        images: dict[int, tuple[Any, ...]] = {}
        if self.image_reader is not None:
            prompts, images = self.image_reader.read(prompts, True, self.longest_text, errors)
        after = {index: completions[index] for index in prompts}
        texts: dict[int, Prompt] = {
            index: prompt + after[index]  # type: ignore[operator]
            for index, prompt in prompts.items()
            if isinstance(prompt, str) and isinstance(after[index], str)
        }
        firsts, first_bytes = self.encode(prompts, errors)
        seconds, second_bytes = self.encode(after, errors, False, "completion")
        wholes = self._tokenize(texts, True, None, errors)
        pairs = {index: split_whole(ids, seconds[index], wholes.get(index, [])) for index, ids in firsts.items()}
        joined = {index: first + second for index, (first, second) in pairs.items()}
        packed = {
            index: first_bytes[index] + second_bytes[index]
            for index, ids in joined.items()
            if not (index in texts or index in errors) and len(ids) <= self.longest_prompt
            if index in first_bytes and index in second_bytes
        }
        # The others may be too long together.
        rest = {index: ids for index, ids in joined.items() if not (index in packed or index in errors)}
        checked, more = self.encode(cast("dict[int, Prompt]", rest), errors)
        joined, packed = joined | checked, packed | more
        return {
            index: EncodedPair(*pair, joined[index], packed.get(index), images.get(index, ()))
            for index, pair in pairs.items()
        }

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a text, however many. Raises RequestError for anything that is not a text."""
        if not isinstance(text, str):
            raise RequestError(f"{text!r} is a {type(text).__name__}; give a string")
        errors: Errors = {}
        token_ids = self._tokenize({0: text}, True, None, errors)[0]
        report(errors, 1)
        return token_ids

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool) -> str:
        """Return the text of one token id or several. Raises RequestError for a wrong id, or without a tokenizer."""
        ids: list[Any] = list(token_ids) if isinstance(token_ids, Iterable) else [token_ids]
        num_ids = max(self.vocab_size, self.tokenizer.num_ids if self.tokenizer else 0)  # some have more than the model
        if wrong := [item for item in ids if not is_whole_number(item) or not 0 <= item < num_ids]:
            raise RequestError(f"{wrong[0]!r} is no token id; ids are 0 to {num_ids - 1}")
        return self.require_tokenizer().decode([int(item) for item in ids], skip_special_tokens)

    def check_params(self, sampling_params: SamplingParams) -> SamplingParams:
        """Return sampling options with their -1 spelt out. Raises RequestError where this model cannot serve them."""
        for name, remedy in NEED_TOKENIZER.items():
            if self.tokenizer is None and (value := getattr(sampling_params, name)):
                raise RequestError(f"{name}={value!r} is about text, and {self._model} has no tokenizer; {remedy}")
        check_against_model(sampling_params, self.vocab_size, self.stop_token_ids, self._max_logprobs)
        counts: dict[str, Any] = {name: self.vocab_size for name in LOGPROBS if getattr(sampling_params, name) == -1}
        return replace(sampling_params, **counts) if counts else sampling_params

    def most_tokens(self, truncate_prompt_tokens: Any) -> int | None:
        """Return how many tokens of a prompt are kept, at most as many as leave room for one more; None is all."""
        number, limit = truncate_prompt_tokens, self.max_model_len
        if number is None:
            return None
        if not is_whole_number(number) or not (number == -1 or 1 <= number <= limit):
            raise RequestError(
                f"truncate_prompt_tokens={number!r} must be a whole number of at least 1 and at most max_model_len="
                f"{limit}; use -1 for as many tokens as the model takes"
            )
        return self.longest_prompt if number == -1 else min(int(number), self.longest_prompt)

    def check_completes(self) -> None:
        """Raise RequestError where the model generates nothing."""
        if self._refusal_reason is not None:
            raise RequestError(self._refusal_reason)

    def _check_token_ids(self, token_ids: list[int], which: str) -> list[int]:
        """Return the ids of "prompt 0", say, as ints. Raises RequestError for what cannot be served."""
        if isinstance(token_ids, ImagePrompt):
            remedy = "give LLM(limit_mm_per_prompt={'image': 4}), say, if the model sees images; else leave them out"
            if self.image_reader is not None:
                remedy = "give them to a prompt of generate, chat, score or embed"
            raise RequestError(f"{which} has images, which are not read here; {remedy}", "not_a_prompt")
        if not isinstance(token_ids, list):
            kind, keys = type(token_ids).__name__, [*token_ids] if isinstance(token_ids, Mapping) else []
            if len(keys) > 1 and (own := next((key for key in ("prompt_token_ids", "prompt") if key in keys), None)):
                rest = [key for key in keys if key != own]
                if "multi_modal_data" in rest:  # that may stand beside a prompt; what else there is is wrong
                    rest = [key for key in rest if key not in IMAGE_PROMPT_FIELDS[2:]] or rest
                others = ", ".join(map(repr, rest))
                raise RequestError(
                    f"{which} has {others} beside {own!r}, which is a whole prompt; leave {others} out", "not_a_prompt"
                )
            raise RequestError(
                f"{which} is a {kind}; give a string or a list of token ids, or {{'prompt': either}}, in place of "
                f"{shown(token_ids):.200}",
                "not_a_prompt",
            )
        if not token_ids:
            raise RequestError(f"{which} is empty; give at least one token", "empty_prompt")
        if {*map(type, token_ids)} != {int}:
            if wrong := [item for item in token_ids if not is_whole_number(item)]:
                raise RequestError(
                    f"{which} has {wrong[0]!r} among its token ids; give ints, or one text alone", "invalid_token_id"
                )
            token_ids = [int(token_id) for token_id in token_ids]  # NumPy's, say
        if outside := [token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size]:
            limit, name = self.vocab_size - 1, self.tokenizer and self.tokenizer.name_of(outside[0])
            if name:
                raise RequestError(
                    f"{which} has {name!r}, a token that the tokenizer has (id {outside[0]}) and the model has not: "
                    f"its ids are 0 to {limit}; leave that text out",
                    "invalid_token_id",
                )
            raise RequestError(
                f"{which} has token id {outside[0]}, outside the vocabulary; ids are 0 to {limit}", "invalid_token_id"
            )
        if len(token_ids) > self.longest_prompt:
            exceeds = "and with one more exceeds" if self.longest_prompt < self.max_model_len else "more than"
            remedy = f"raise {self._limit} if model and KV cache allow"
            if self.longest_prompt == self.max_model_len:
                remedy += ", or have it cut by tokenization_kwargs={'truncate_prompt_tokens': -1}"
            raise RequestError(
                f"{which} has {len(token_ids)} tokens, {exceeds} {self._limit}={self.max_model_len}; "
                f"shorten it to {self.longest_prompt}, or {remedy}",
                "prompt_too_long",
            )
        return token_ids


def text_beside_images(prompt: Any) -> str | None:
    """Return the text of a prompt with images; None for token ids, and for anything that is not a prompt."""
    return prompt.prompt if isinstance(prompt, ImagePrompt) and isinstance(prompt.prompt, str) else None


def pack_ids(token_ids: Any) -> bytes | None:
    """Return the token ids of a list as int32; None if it is no list of ints alone, is empty, or has larger ones.

    It goes once through the list, since marshal writes an int of 32 bits as "i" and four bytes, and a bool or any other
    object with another letter. For long prompts, looking at all types first and packing the ints then takes twice as
    long. The first and the last item are looked at: marshal would write out what large objects hold.
    """
    if not isinstance(token_ids, list) or not token_ids:
        return None
    if type(token_ids[0]) is not int or type(token_ids[-1]) is not int:
        return None
    try:
        written = marshal.dumps(token_ids, 2)  # format 2, in which equal objects are not replaced by references
    except ValueError:  # there are objects that it cannot write
        return None
    num_ids = len(token_ids)
    if len(written) != LIST_HEADER + MARSHALLED_INT.itemsize * num_ids:
        return None
    if written[LIST_HEADER :: MARSHALLED_INT.itemsize] != b"i" * num_ids:
        return None
    return np.frombuffer(written, MARSHALLED_INT, offset=LIST_HEADER)["value"].tobytes()


def split_whole(prompt: list[int], completion: list[int], whole: list[int]) -> tuple[list[int], list[int]]:
    """Split `whole`, the ids of both texts in one; return the ids as given where no token is left for the prompt.

    The completion begins where `whole` differs from the prompt's own ids, and gets a token across the border.
    """
    num_same = next((i for i, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]), len(prompt))
    num_same = min(num_same, len(whole) - 1)
    return (whole[:num_same], whole[num_same:]) if num_same > 0 else (prompt, completion)


def find_bad_texts(texts: Mapping[int, str], max_characters: int) -> Errors:
    """Return the errors of texts that are not Unicode, or too long for any tokenizer, by the index of their prompts."""
    errors: Errors = {}
    for index, text in texts.items():
        if len(text) > max_characters:
            errors[index] = RequestError(
                f"prompt {index} has {len(text)} characters, and max_model_len tokens hold {max_characters} at most; "
                "shorten it",
                "prompt_too_long",
            )
            continue
        try:
            text.encode()
        except UnicodeEncodeError:
            errors[index] = RequestError(
                f"prompt {index} has a lone surrogate, which is no character: {shown(text)}; decode its bytes as UTF-8",
                "not_unicode",
            )
    return errors
