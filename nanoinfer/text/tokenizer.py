"""Text to token ids and back, by the model's own tokenizer from transformers, and the ids that end a completion."""

import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from nanoinfer.checkpoint.hub import LFS_REMEDY, is_lfs_pointer, read_json, resolve_model_folder
from nanoinfer.config import EngineConfig
from nanoinfer.errors import ModelError, RequestError
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.text.completion_text import CompletionText, TokenTexts
from nanoinfer.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    find_byte_format,
    look_up_bytes,
)
from nanoinfer.text.tokenizer_class import PASSED_ON, load_by_class

logger = logging.getLogger("nanoinfer")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
# Nobody reads these lists, and making each takes as long as making the token ids.
IDS_ALONE = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
NUM_COMPARED = 8  # texts
BASE_MODULES = (
    "transformers.tokenization_utils_base",
    "transformers.tokenization_utils_fast",
    "transformers.tokenization_utils_tokenizers",
)
ENCODING_METHODS = ("__call__", "_encode_plus", "_batch_encode_plus")  # the last one of transformers 4


class Tokenizer:
    """Encodes and decodes by a transformers tokenizer, `hf`, and turns its failures into errors of ours.

    Any thread may encode or decode.
    """

    def __init__(self, folder: Path) -> None:
        self.lock = threading.Lock()  # a tokenizer that is told to truncate must not be encoding meanwhile
        try:
            self.hf: Any = load_by_class(folder)
        except PASSED_ON:
            raise
        except BaseException as error:
            for path in filter(is_lfs_pointer, (folder / name for name in TOKENIZER_FILES)):
                raise ModelError(f"{path} {LFS_REMEDY}") from None
            raise ModelError(f"the tokenizer in {folder} cannot be loaded ({error}); check its files") from error
        if getattr(self.hf, "chat_template", None) is None:  # multimodal checkpoints have had it in a file of its own
            self.hf.chat_template = read_json(folder / "chat_template.json").get("chat_template")
        self.writes_tools: set[Any] = set()  # kinds of chats into which the chat template was seen to write tools
        self._texts: dict[int, str] = {}  # of single tokens
        self._agrees: dict[bool, bool] = {}  # whether the backend says what `hf` says, by add_special_tokens
        backend: Any = getattr(self.hf, "backend_tokenizer", None)  # None for tokenizers written in Python
        self._backend = backend
        decoder = json.loads(backend.decoder.__getstate__()) if backend and backend.decoder else {}
        self._is_byte_level = decoder.get("type") == "ByteLevel"
        self._byte_format = find_byte_format(decoder)
        if self._byte_format:
            self._all_tokens = look_up_bytes(self._byte_format, backend.id_to_token)
            self._plain_tokens = look_up_bytes(self._byte_format, backend.id_to_token, skipped=self._special_tokens)

    @cached_property
    def eos_token_id(self) -> int | None:
        """Return the one that the tokenizer itself names; the model's files may have others."""
        return self.hf.eos_token_id

    @cached_property
    def added_tokens(self) -> dict[int, str]:
        """Return the tokens that stand for themselves wherever they are written, by id; many are special."""
        return {token_id: str(token) for token_id, token in self.hf.added_tokens_decoder.items()}

    @cached_property
    def _special_tokens(self) -> dict[int, str]:
        return {token_id: str(token) for token_id, token in self.hf.added_tokens_decoder.items() if token.special}

    @cached_property
    def num_ids(self) -> int:
        """Return the largest token id plus one, which may be more or less than the model's vocabulary."""
        return max(self.hf.get_vocab().values(), default=-1) + 1

    def name_of(self, token_id: int) -> str | None:
        """Return a token as the vocabulary writes it; None for an id that the tokenizer does not know."""
        return self.hf.convert_ids_to_tokens(token_id) if 0 <= token_id < self.num_ids else None

    @cached_property
    def longest_token(self) -> int:
        """Return the most characters that one token may stand for; some tokenizers may drop any number of them."""
        return max(map(len, self.hf.get_vocab())) if self._is_byte_level else sys.maxsize

    def encode(
        self, texts: list[str], add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[list[int]]:
        """Encode plain texts in one batch, with the special tokens that the tokenizer adds, or as they are.

        A text that begins with the tokenizer's BOS, as one rendered by a chat template may, does not get a second. A
        text of more than `max_tokens` keeps its last tokens, and before them the BOS if the tokenizer adds one.
        """
        if not texts:
            return []
        with self._encodes():
            batch = self._token_ids(texts, add_special_tokens)
            bos, bos_id = self.hf.bos_token, self.hf.bos_token_id
            adds_bos = add_special_tokens and bos is not None and self.hf("")["input_ids"][:1] == [bos_id]
        if adds_bos:
            batch = [ids[1:] if text.startswith(bos) else ids for text, ids in zip(texts, batch, strict=True)]
        return [keep_last(ids, max_tokens, num_first=int(adds_bos)) for ids in batch]

    def encode_whole(
        self, texts: list[str], pairs: list[str] | None = None, max_tokens: int | None = None
    ) -> tuple[list[list[int]], list[int | None]]:
        """Encode texts in one batch, as for an encoder: with all special tokens, also where a text is cut.

        pairs: second texts, one for each. max_tokens: the most tokens; the tokenizer cuts more off, by its own side.
        Returns the token ids, and where the second text of each pair begins; None where the tokenizer does not say.
        """
        cut = {} if max_tokens is None else {"truncation": True, "max_length": max_tokens}
        options: dict[str, Any] = {**IDS_ALONE, **cut}
        if pairs is not None:  # whether the model tells texts apart is what the tokenizer says
            options["return_token_type_ids"] = "token_type_ids" in self.hf.model_input_names
        with self._encodes():
            if pairs is None and max_tokens is None:
                return self._token_ids(texts, add_special_tokens=True), [None] * len(texts)
            batch = self.hf(texts, pairs, **options)
        types = batch.get("token_type_ids")
        if pairs is None or types is None:
            return batch["input_ids"], [None] * len(texts)
        return batch["input_ids"], [found.index(1) if 1 in found else None for found in types]

    @contextmanager
    def _encodes(self) -> Iterator[None]:
        """Let one thread encode while the block runs. Raises RequestError where the tokenizer fails."""
        try:
            with self.lock:
                yield
        except PASSED_ON:
            raise
        except BaseException as error:
            raise RequestError(f"the tokenizer cannot encode a prompt ({error}); shorten it") from error

    def _token_ids(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """Encode texts in one batch.

        transformers calls a tokenizer that is written in Rust, and then takes as long again for what nobody reads. So
        the Rust tokenizer is called directly, unless the model's class adds something, or the two disagree on the
        first texts.
        """

        def by_transformers(texts: list[str]) -> list[list[int]]:
            ids: list[list[int]] = self.hf(texts, add_special_tokens=add_special_tokens, **IDS_ALONE)["input_ids"]
            return ids

        if add_special_tokens not in self._agrees:
            methods = [getattr(type(self.hf), name, None) for name in ENCODING_METHODS]
            is_plain = all(one is None or getattr(one, "__module__", "") in BASE_MODULES for one in methods)
            sample = texts[:NUM_COMPARED]
            self._agrees[add_special_tokens] = (
                is_plain
                and self._backend is not None
                and by_transformers(sample) == self._encode_fast(sample, add_special_tokens)
            )
        if self._agrees[add_special_tokens]:
            return self._encode_fast(texts, add_special_tokens)
        return by_transformers(texts)

    def _encode_fast(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        while True:
            backend = self._backend
            # An earlier call, or the tokenizer's file, may have set these.
            backend.no_truncation()
            backend.no_padding()
            splits = backend.encode_special_tokens = getattr(self.hf, "split_special_tokens", False)
            found = backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            settings = backend.truncation, backend.padding, backend.encode_special_tokens
            is_padded = len({*map(len, found)}) == 1 and any(0 in one.attention_mask for one in found)
            if settings == (None, None, splits) and not is_padded and not any(one.overflowing for one in found):
                return [one.ids for one in found]
            # A thread of the user's has set them just now, by a call of its own. From now on we encode with a copy.
            self._backend = type(backend).from_str(backend.to_str())

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Decode a whole completion as `detokenizer` does bit by bit. Raises RequestError where that fails."""
        if self._byte_format:
            return self.detokenizer(skip_special_tokens).decode(token_ids, final=True)
        try:  # spaces before punctuation stay
            return str(self.hf.decode(token_ids, skip_special_tokens, clean_up_tokenization_spaces=False))
        except PASSED_ON:
            raise
        except BaseException as error:
            raise RequestError(f"the tokenizer cannot decode {token_ids} ({error}); check its files") from error

    def detokenizer(
        self,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        prompt: Sequence[int] = (),
    ) -> Detokenizer:
        """Return what decodes one completion of a prompt bit by bit."""
        if self._byte_format:
            return ByteDetokenizer(self._plain_tokens if skip_special_tokens else self._all_tokens, prompt)

        def decode(token_ids: list[int]) -> str:
            try:
                return self.decode(token_ids, skip_special_tokens)
            except RequestError:
                return "".join(map(self._text_alone, token_ids))

        are_joined = not (skip_special_tokens or spaces_between_special_tokens)
        return WindowDetokenizer(decode, self.added_tokens if are_joined else None, prompt)

    def token_texts(
        self,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        prompt: Sequence[int] = (),
    ) -> TokenTexts:
        """Return an object that tells the text of each token of a completion, also of skipped special tokens."""
        detokenizer = self.detokenizer(skip_special_tokens, spaces_between_special_tokens, prompt)
        return TokenTexts(detokenizer, self._special_tokens if skip_special_tokens else {})

    def bytes_of(self, token_id: int) -> bytes:
        """Return what a token stands for within a text, special tokens included."""
        return self._all_tokens.bytes_of(token_id) if self._byte_format else self._text_alone(token_id).encode()

    def _text_alone(self, token_id: int) -> str:
        """Decode one token alone; "" where the tokenizer fails, which must not stop a step."""
        if token_id not in self._texts:
            try:
                self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
            except RequestError as error:
                logger.warning("a token has no text: %s", error)
                self._texts[token_id] = ""
        return self._texts[token_id]


def keep_last(token_ids: Any, max_tokens: int | None, num_first: int = 0) -> Any:
    """Return at most `max_tokens` of the token ids: the last ones, after the first `num_first`; None is all.

    What is no list is returned as it is, to be refused later.
    """
    if max_tokens is None or not isinstance(token_ids, (list, tuple)) or len(token_ids) <= max_tokens:
        return token_ids
    num_first = min(num_first, max_tokens - 1)
    return [*token_ids[:num_first], *token_ids[len(token_ids) - max_tokens + num_first :]]


def find_tokenizer(config: EngineConfig, model_folder: Path) -> Path:
    """Return the folder of the tokenizer that the options name; else the model's own, which may lack one.

    Raises ModelError where they name a place without a tokenizer.
    """
    if config.tokenizer is None:
        return model_folder
    folder = model_folder
    if config.tokenizer != config.model:
        folder = resolve_model_folder(
            config.tokenizer, with_weights=False, download_dir=config.download_dir, option="tokenizer"
        )
    if not _has_tokenizer(folder):
        raise ModelError(
            f"tokenizer={config.tokenizer!r} has none of {', '.join(TOKENIZER_FILES)}; give the folder or the hub id "
            "of a tokenizer"
        )
    return folder


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def load_tokenizer(folder: Path, vocab_size: int | None = None) -> Tokenizer | None:
    """Load the tokenizer in `folder`; None where there is none, and prompts must be token ids.

    It is slow, because it imports transformers, and safe to call in a thread while another loads the weights. A
    tokenizer may have tokens that the model does not know, as a padding token that fine-tuning has added. vocab_size:
    the model's; where the tokenizer has more even without those that were added, it may be another model's, and a
    warning says so. Raises ModelError where the tokenizer cannot be loaded.
    """
    if not _has_tokenizer(folder):
        return None
    tokenizer = Tokenizer(folder)
    if vocab_size is not None and tokenizer.hf.vocab_size > vocab_size:
        logger.warning(
            "the tokenizer in %s has %d tokens, and config.json vocab_size=%d; it may be another model's, and prompts "
            "that contain its last tokens are refused",
            folder,
            tokenizer.num_ids,
            vocab_size,
        )
    return tokenizer


def read_stop_token_ids(folder: Path, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the tokenizer's eos and those of generation_config.json or, lacking that file, of config.json."""
    path = folder / "generation_config.json"
    path = path if path.exists() else folder / "config.json"
    eos = read_json(path).get("eos_token_id")
    listed = eos if isinstance(eos, list) else [eos]
    if not all(item is None or isinstance(item, int) for item in listed):
        raise ModelError(f"{path} has eos_token_id={eos!r}; it must be an id or a list of ids")
    return frozenset({*listed, tokenizer.hf.eos_token_id if tokenizer else None} - {None})


def completion_text(tokenizer: Tokenizer | None, params: SamplingParams, prompt: Sequence[int]) -> CompletionText:
    """Return the text of a prompt's completion that has just begun; without a tokenizer it stays empty."""
    detokenizer = of_tokens = None
    if tokenizer and params.detokenize:
        options = params.skip_special_tokens, params.spaces_between_special_tokens
        detokenizer = tokenizer.detokenizer(*options, prompt)
        of_tokens = None if params.num_logprobs is None else tokenizer.token_texts(*options, prompt)
    return CompletionText(detokenizer, params.stop or (), params.include_stop_str_in_output, of_tokens)


def prompt_texts(
    tokenizer: Tokenizer | None, params: SamplingParams, prompt: str | None, token_ids: Sequence[int]
) -> Callable[[], TokenTexts] | None:
    """Return what makes the texts of a prompt's tokens after its first, in any thread; None where there are none.

    A prompt that was given as a text begins behind the special tokens that the tokenizer has put in front.
    """
    if tokenizer is None or not params.detokenize:
        return None
    return partial(tokenizer.token_texts, prompt is not None, params.spaces_between_special_tokens, token_ids[:1])
