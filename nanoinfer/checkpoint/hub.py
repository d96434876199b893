"""Where a model's files are: in a local folder, or in the Hugging Face hub's cache after a download."""

import json
from pathlib import Path
from typing import Any

from nanoinfer.errors import ModelError

PATTERNS = ["*.json", "*.txt", "*.jinja", "*.model"]
WEIGHTS = ["*.safetensors"]  # no pickled ones
GGUF_REMEDY = (
    "give the original checkpoint in safetensors, or make one by transformers' from_pretrained(folder, gguf_file=...) "
    "and save_pretrained"
)


def resolve_model_folder(model: str, with_weights: bool = True) -> Path:
    """Return the local folder of `model`, a path or a hub id such as "Qwen/Qwen3-0.6B".

    What is in the hub's cache is not fetched again. Raises ModelError where there is no such folder and the hub has no
    such model, or cannot be reached.
    """
    try:
        folder = Path(model).expanduser()
        if model and folder.is_dir():
            return folder
        if folder.is_file() and folder.suffix == ".gguf":
            raise ModelError(f"model={model!r} is a GGUF file; {GGUF_REMEDY}")
        if folder.is_file():
            raise ModelError(f"model={model!r} is a file; give the folder that holds config.json")
    except (OSError, RuntimeError) as error:  # a name too long for any file, the home of nobody
        raise ModelError(f"model={model!r} cannot be a folder ({error}); give another") from None
    parts = model.split("/")
    if len(parts) != 2 or not all(parts) or model.startswith((".", "~")) or "\\" in model:
        raise ModelError(f"model={model!r}: there is no such folder; give one, or a hub id such as 'Qwen/Qwen3-0.6B'")

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=PATTERNS + WEIGHTS * with_weights))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(
            f"model={model!r} is no folder here, and could not be fetched from the hub ({reason}); check the spelling "
            "and the connection, or give a local folder"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file of a model; {} where there is none. Raises ModelError where it is no such file."""
    if not path.exists():
        return {}
    if not path.is_file():  # a device would be read for ever
        raise ModelError(f"{path} is no file; download it again")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:  # no JSON, no text, or not ours to read
        raise ModelError(f"{path} is not valid JSON ({error}); download the file again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, not an object; download the file again")
    return content
