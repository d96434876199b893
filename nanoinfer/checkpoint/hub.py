"""Finds a model's files: in a local folder, or in the Hugging Face hub's cache after a download."""

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanoinfer.errors import ConfigError, ModelError

PATTERNS = ["*.json", "*.txt", "*.jinja", "*.model"]
WEIGHTS = ["*.safetensors"]  # no pickled ones
SECOND_COPIES = ["consolidated*", "original/*"]  # the same weights in the layout of Mistral's and Llama's own code
TINY = Path(__file__).parents[1] / "assets" / "tiny-qwen3"  # the checkpoint that comes with the package
LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # how a file begins that Git LFS has not fetched
LFS_REMEDY = (
    "is a Git LFS pointer in place of the file itself; run `git lfs install` and `git lfs pull` in its folder, or "
    "download the model again"
)
HUB_HOSTS = ("huggingface.co/", "hf.co/", "www.huggingface.co/")
HUB_ADDRESS = re.compile(r"(?:\w+://)?(?:www\.)?(?:huggingface|hf)\.co/([\w.-]+/[\w.-]+)")
GGUF_REMEDY = "give the original checkpoint in safetensors, or make one by transformers as docs/models.md shows"


def resolve_model_folder(
    model: str,
    with_weights: bool = True,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    option: str = "model",
) -> Path:
    """Return the local folder of `model`: a path, a hub id such as "Qwen/Qwen3-0.6B", or "tiny" for TINY.

    A local folder comes first, one that is called "tiny" too. revision: a branch, tag or commit on the hub.
    download_dir: the cache of downloads, if not the hub's own. option: what messages call `model`. What is in the cache
    is not fetched again. Raises ModelError where there is no such folder and the hub has no such model, or cannot be
    reached; ConfigError for a revision of a local folder.
    """
    named = f"{option}={model!r}"
    try:
        folder = Path(model).expanduser()
        if model == "tiny" and not folder.exists():
            folder = TINY
        if model and folder.is_dir():
            if revision is not None:
                raise ConfigError(
                    f"revision={revision!r} is of a model on the hub, and {named} is a local folder; leave revision "
                    "out, or give a hub id"
                )
            return folder
        if folder.is_file() and folder.suffix == ".gguf":
            raise ModelError(f"{named} is a GGUF file; {GGUF_REMEDY}")
        if folder.is_file():
            raise ModelError(f"{named} is a file; give the folder that holds it")
    except (OSError, RuntimeError) as error:  # a name too long for any file, the home of nobody
        raise ModelError(f"{named} cannot be a folder ({error}); give another") from None
    if "://" in model or model.startswith(HUB_HOSTS):
        found = HUB_ADDRESS.match(model)
        give = f"its hub id, {found[1]!r}" if found else "a hub id such as 'Qwen/Qwen3-0.6B', or a local folder"
        raise ModelError(f"{named} is an address on the web; give {give}")
    parts = model.split("/")
    if len(parts) != 2 or not all(parts) or model.startswith((".", "~")) or "\\" in model:
        raise ModelError(f"{named}: there is no such folder; give one, or a hub id such as 'Qwen/Qwen3-0.6B'")

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        cache = None if download_dir is None else os.path.expanduser(download_dir)
        patterns = PATTERNS + WEIGHTS * with_weights
        options = {"revision": revision, "cache_dir": cache, "allow_patterns": patterns}
        return Path(snapshot_download(model, **options, ignore_patterns=SECOND_COPIES))
    except (HfHubHTTPError, ValueError, OSError) as error:  # the last two also for what is not in the cache
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        no_hub = ", or 'tiny', which comes with the package" if option == "model" else ""
        at = "" if revision is None else f" at revision={revision!r}"
        raise ModelError(
            f"{named} is no folder here, and could not be fetched from the hub{at} ({reason}); check the spelling and "
            f"the connection, or give a local folder{no_hub}"
        ) from None  # a chain of a hundred lines would hide the reason, which is in the message


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a clone without Git LFS has left this file as a few lines that name the real one."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER
    return False


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file of a model; {} where there is none. Raises ModelError if it is not such a file."""
    content = _read_json(path, {})
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, not an object; download the file again")
    return content


def read_json_list(path: Path) -> list[Any]:
    """Do as `read_json` with a list, which is [] where there is no file."""
    content = _read_json(path, [])
    if not isinstance(content, list):
        raise ModelError(f"{path} holds a {type(content).__name__}, not a list; download the file again")
    return content


def _read_json(path: Path, absent: Any) -> Any:
    if not path.exists():
        return absent
    if not path.is_file():  # a device would be read for ever
        raise ModelError(f"{path} is no file; download it again")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:  # no JSON, no text, or not ours to read
        what = LFS_REMEDY if is_lfs_pointer(path) else f"is not valid JSON ({error}); download the file again"
        raise ModelError(f"{path} {what}") from None
