"""Where a model's files are found: a local folder, the hub's cache, or an error that says what to do."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nanoinfer
from nanoinfer.checkpoint.hub import resolve_model_folder
from nanoinfer.errors import ConfigError, ModelError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NOBODY = "http://127.0.0.1:9"  # where no hub answers


def test_a_local_folder_comes_before_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model_folder("org/name") == Path("org/name")
    assert resolve_model_folder(str(tmp_path)) == tmp_path
    assert resolve_model_folder("~/org") == tmp_path / "org"


def test_tiny_is_the_included_checkpoint_unless_a_folder_has_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_model_folder("tiny") == nanoinfer.tiny_model_path()
    with pytest.raises(ConfigError, match="revision='v2' is of a model on the hub, and model='tiny' is a local folder"):
        resolve_model_folder("tiny", revision="v2")
    (tmp_path / "tiny").mkdir()
    assert resolve_model_folder("tiny") == Path("tiny")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "model.safetensors.index.json"])
def test_a_pointer_of_git_lfs_is_named_as_one(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(nanoinfer.tiny_model_path(), folder)
    (folder / name).write_text(POINTER)
    with pytest.raises(ModelError) as error:
        nanoinfer.LLM(folder, device="cpu")
    assert str(error.value) == (
        f"{folder / name} is a Git LFS pointer in place of the file itself; run `git lfs install` and `git lfs pull` "
        "in its folder, or download the model again"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "is a file; give the folder that holds it"),
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


def resolve_elsewhere(model: str, cwd: Path, options: dict[str, str] | None = None, **settings: str) -> str:
    """The folder of `model`, or the type and message of the error, in an interpreter with these HF settings."""
    source = (
        "import json, sys\n"
        "from nanoinfer.checkpoint.hub import resolve_model_folder\n"
        "try:\n"
        "    print(resolve_model_folder(sys.argv[1], **json.loads(sys.argv[2])))\n"
        "except Exception as error:\n"
        "    print(f'{type(error).__name__}: {error}')\n"
    )
    others = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = {**others, "PYTHONPATH": str(Path(nanoinfer.__file__).parents[1]), **settings}
    result = subprocess.run(
        [sys.executable, "-c", source, model, json.dumps(options or {})],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def cached_model(cache: Path, revision: str = "main", commit: str = COMMIT) -> Path:
    """Lay out org/name as the hub's library does; the folder of its snapshot."""
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / revision).write_text(commit)
    return snapshot


@pytest.mark.parametrize(
    ("model", "hub_id"),
    [
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "'Qwen/Qwen3-0.6B'"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main?a=b", "'Qwen/Qwen3-0.6B'"),
        ("http://www.huggingface.co/org/model#readme", "'org/model'"),
        ("hf.co/org/model", "'org/model'"),
        ("huggingface.co/org", "a hub id such as 'Qwen/Qwen3-0.6B', or a local folder"),
        ("https://example.com/org/model", "a hub id such as 'Qwen/Qwen3-0.6B', or a local folder"),
    ],
)
def test_an_address_is_refused_with_the_id_to_use(model: str, hub_id: str) -> None:
    with pytest.raises(ModelError) as error:
        resolve_model_folder(model, option="tokenizer")
    assert str(error.value).startswith(f"tokenizer={model!r} is an address on the web; give ")
    assert str(error.value).endswith(hub_id)


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
    remedy = "check the spelling and the connection, or give a local folder, or 'tiny', which comes with the package"
    assert said.endswith(remedy)


def test_an_unreachable_hub_is_said_without_the_tracebacks_of_its_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelError, match=r"\(no network\)") as error:
        resolve_model_folder("org/name", download_dir=str(tmp_path))
    assert error.value.__suppress_context__
    assert error.value.__cause__ is None


def test_a_branch_or_commit_and_the_folder_of_downloads_are_those_asked_for(tmp_path: Path) -> None:
    other = "f" * 40
    snapshots = {"main": cached_model(tmp_path / "mine"), "v2": cached_model(tmp_path / "mine", "v2", other)}
    settings = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub"), "HOME": str(tmp_path)}
    for revision, snapshot in [("v2", snapshots["v2"]), (other, snapshots["v2"]), (COMMIT, snapshots["main"])]:
        options = {"revision": revision, "download_dir": "~/mine"}
        assert resolve_elsewhere("org/name", tmp_path, options, **settings) == str(snapshot)
    missing = resolve_elsewhere("org/name", tmp_path, {"revision": "v3", "download_dir": "mine"}, **settings)
    assert missing.startswith(
        "ModelError: model='org/name' is no folder here, and could not be fetched from the hub at "
    )
    assert "at revision='v3' (" in missing
    assert resolve_elsewhere("org/name", tmp_path, **settings).startswith("ModelError: model='org/name' is no folder")


@pytest.mark.parametrize("options", [{"download_dir": "file"}, {"download_dir": "a\0b"}, {"revision": "\ud800"}])
def test_a_folder_of_downloads_or_a_revision_that_cannot_be_is_a_model_error(
    options: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    said = resolve_elsewhere("org/name", tmp_path, options, HF_HUB_CACHE=str(tmp_path), HF_ENDPOINT=NOBODY)
    assert said.startswith("ModelError: model='org/name' is no folder here, and could not be fetched from the hub")


def test_a_revision_of_a_local_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_model_folder(str(tmp_path), revision="v2")
    assert str(error.value) == (
        f"revision='v2' is of a model on the hub, and model={str(tmp_path)!r} is a local folder; leave revision out, "
        "or give a hub id"
    )


@pytest.mark.parametrize("model", ["my models/qwen3", "org/name--x", "org/-name"])
def test_a_name_that_no_hub_id_can_have_is_a_model_error(model: str, tmp_path: Path) -> None:
    said = resolve_elsewhere(model, tmp_path, HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE="1")
    assert said.startswith(f"ModelError: model={model!r}")
