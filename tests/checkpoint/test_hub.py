"""Where a model's files are found: a local folder, the hub's cache, or an error that says what to do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import nanoinfer
from nanoinfer.checkpoint.hub import resolve_model_folder
from nanoinfer.errors import ModelError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NOBODY = "http://127.0.0.1:9"  # where no hub answers


def test_a_local_folder_comes_before_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model_folder("org/name") == Path("org/name")
    assert resolve_model_folder(str(tmp_path)) == tmp_path
    assert resolve_model_folder("~/org") == tmp_path / "org"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "is a file; give the folder that holds config.json"),
        ("model.gguf", "is a GGUF file; give the original checkpoint in safetensors"),
    ],
)
def test_a_file_is_refused(name: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.touch()
    with pytest.raises(ModelError) as error:
        resolve_model_folder(str(path))
    assert str(error.value).startswith(f"model={str(path)!r} {message}")


@pytest.mark.parametrize(
    "model", ["missing", "./missing", "../missing/model", "/missing/model", "~/missing", "a/b/c", "org/", ".\\a/b"]
)
def test_a_missing_folder_is_named_and_the_hub_is_not_asked(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # an import of it would fail
    with pytest.raises(ModelError) as error:
        resolve_model_folder(model)
    assert (
        str(error.value) == f"model={model!r}: there is no such folder; give one, or a hub id such as 'Qwen/Qwen3-0.6B'"
    )


# --- hub ids, in an interpreter of their own: the hub's library reads its settings once ---


def resolve_elsewhere(model: str, cwd: Path, **settings: str) -> str:
    """The folder of `model`, or the type and message of the error, in an interpreter with these HF settings."""
    source = (
        "import sys\n"
        "from nanoinfer.checkpoint.hub import resolve_model_folder\n"
        "try:\n"
        "    print(resolve_model_folder(sys.argv[1]))\n"
        "except Exception as error:\n"
        "    print(f'{type(error).__name__}: {error}')\n"
    )
    others = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = {**others, "PYTHONPATH": str(Path(nanoinfer.__file__).parents[1]), **settings}
    result = subprocess.run(
        [sys.executable, "-c", source, model], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def cached_model(cache: Path) -> Path:
    """Lay out org/name as the hub's library does; the folder of its snapshot."""
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


@pytest.mark.parametrize("settings", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": NOBODY}])
def test_a_cached_hub_id_is_found_offline_and_when_the_hub_cannot_be_reached(
    settings: dict[str, str], tmp_path: Path
) -> None:
    snapshot = cached_model(tmp_path / "hub")
    assert resolve_elsewhere("org/name", tmp_path, HF_HUB_CACHE=str(tmp_path / "hub"), **settings) == str(snapshot)


@pytest.mark.parametrize("settings", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": NOBODY}])
def test_a_hub_id_that_is_neither_cached_nor_reachable_is_an_error_with_the_remedy(
    settings: dict[str, str], tmp_path: Path
) -> None:
    said = resolve_elsewhere("org/name", tmp_path, HF_HUB_CACHE=str(tmp_path), **settings)
    assert "ModelError: model='org/name' is no folder here, and could not be fetched from the hub (" in said
    assert said.endswith("check the spelling and the connection, or give a local folder")


@pytest.mark.parametrize("model", ["my models/qwen3", "org/name--x", "org/-name"])
def test_a_name_that_no_hub_id_can_have_is_a_model_error(model: str, tmp_path: Path) -> None:
    said = resolve_elsewhere(model, tmp_path, HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE="1")
    assert said.startswith(f"ModelError: model={model!r}")
