"""Where a model's files are: in a local folder, or in the Hugging Face hub's cache after a download."""

from pathlib import Path

from nanoinfer.errors import ModelError

PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]  # no pickled weights


def resolve_model_folder(model: str) -> Path:
    """The local folder of `model`, a path or a hub id such as "Qwen/Qwen3-0.6B"; what is cached is not fetched again.

    Raises ModelError where there is no such folder and the hub has no such model, or cannot be reached.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError(f"model={model!r} is a file; give the folder that holds config.json")
    if not _is_hub_id(model):
        raise ModelError(f"model={model!r}: there is no such folder; give one, or a hub id such as 'Qwen/Qwen3-0.6B'")

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=PATTERNS))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"model={model!r} is no folder here, and could not be fetched from the hub ({reason}); check the spelling "
            "and the connection, or give a local folder"
        ) from error


def _is_hub_id(model: str) -> bool:
    parts = model.split("/")
    return len(parts) == 2 and all(parts) and not model.startswith((".", "~", "/")) and "\\" not in model
