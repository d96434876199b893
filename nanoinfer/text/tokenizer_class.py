"""Chooses the class of transformers that loads a tokenizer: the one its folder names, unless tokenizer.json differs."""

import json
from pathlib import Path
from typing import Any

from nanoinfer.checkpoint.hub import read_json

# Not the tokenizer's failures. All else is, even where it is no Exception, as a panic of its Rust code.
PASSED_ON = (KeyboardInterrupt, SystemExit, MemoryError)
PROBES = ("It's 1,234.5 °C", "a   b", "\tif x:\n\n    y\r\n", "über 中文 नमस्ते 🍮")  # what tokenizers split differently
CLASS_OPTIONS = ("add_prefix_space", "trim_offsets")  # tokenizer_config.json has them too


def load_by_class(folder: Path) -> Any:
    """Load a tokenizer by the class that its folder names, or by tokenizer.json alone where the two disagree.

    The classes of transformers 5 build most of a tokenizer anew, with their own way to split texts, and read little but
    the vocabulary from tokenizer.json. Those of transformers 4 read all of it, but may add a BOS.
    """
    import transformers  # slow to import, so only where text is wanted

    plain = transformers.PreTrainedTokenizerFast  # reads the file as it stands
    path, settings = folder / "tokenizer.json", read_json(folder / "tokenizer_config.json")
    if not path.exists() or "auto_map" in settings:  # which names code of the checkpoint's own
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    options: dict[str, Any] = {}
    if plain.__name__ != "TokenizersBackend" and isinstance(listed := settings.get("extra_special_tokens"), list):
        options = {"extra_special_tokens": {}, "additional_special_tokens": listed}  # as transformers 4 calls them
    if isinstance(name := settings.get("tokenizer_class"), str):
        # AutoTokenizer would find the same one, but may import much of transformers first.
        named = getattr(transformers, name.removesuffix("Fast") + "Fast", None) or plain
    else:
        named = transformers.AutoTokenizer
    try:
        found = named.from_pretrained(folder, trust_remote_code=False, **options)
    except PASSED_ON:
        raise
    except BaseException:  # it cannot hold another kind of vocabulary, say
        found = None
    if found is not None and (type(found) is plain or _follows(found, path)):
        return found
    return plain.from_pretrained(folder, **options)


def _follows(found: Any, path: Path) -> bool:
    """Return whether a tokenizer that some class has made is to be used in place of what its tokenizer.json says.

    It is where both say the same. Where they are of one kind, options such as `do_lower_case` and `legacy` may make the
    difference, and the class counts, as it does for AutoTokenizer.
    """
    from tokenizers import Tokenizer as Backend

    backend = getattr(found, "backend_tokenizer", None)
    if backend is None:  # it is written in Python
        return True
    file = read_json(path)
    model, kind = file["model"], type(backend.model).__name__
    emptied: dict[str, Any] = {
        "added_tokens": [],
        "post_processor": None,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    ours, theirs = _steps(backend), _steps(Backend.from_str(json.dumps({**file, **emptied})))
    is_byte_level = theirs[-1]["type"] == "ByteLevel"
    if is_byte_level and any(name.endswith(".model") for name in type(found).vocab_files_names.values()):
        return False  # a class for SentencePiece, as Llama 2 has it
    flags = {name: bool(model.get(name)) for name in ("ignore_merges", "byte_fallback")}
    if ours == theirs and all(getattr(backend.model, name, False) == value for name, value in flags.items()):
        return True
    if is_byte_level or ours[-1]["type"] == "ByteLevel" or kind != model.get("type", kind):
        return False
    if kind != "BPE":
        return True
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    registered = TOKENIZER_MAPPING_NAMES.get(read_json(path.with_name("config.json")).get("model_type"))
    if registered in ("TokenizersBackend", "MistralCommonBackend"):
        return False
    whole = Backend.from_file(str(path))
    return all(backend.encode(text).tokens == whole.encode(text).tokens for text in PROBES)


def _steps(backend: Any) -> list[Any]:
    """Return how a tokenizer of the Rust library splits and joins texts, without options that the class may have."""

    def simplify(step: Any) -> Any:
        if isinstance(step, list):
            return [simplify(item) for item in step]
        if isinstance(step, dict):
            return {name: simplify(value) for name, value in step.items() if name not in CLASS_OPTIONS}
        return step

    steps = (backend.normalizer, backend.pre_tokenizer, backend.decoder)
    found = [simplify(json.loads(step.__getstate__())) if step else {"type": None} for step in steps]
    if found[-1]["type"] == "ByteLevel":
        found[-1] = {"type": "ByteLevel"}  # its options are for splitting
    return found
