"""What the tests share: Triton's interpreter where there is no GPU, the skipping of GPU tests, random checkpoints.

PyTorch does not import Triton by itself, so that there is time here to choose the interpreter.
"""

import faulthandler
import gc
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoinfer.executor import processes
from nanoinfer.models.implementations import FIRST_VERSION
from nanoinfer.runner import memory
from tests.real.make_smollm2 import HOW_TO_INSTALL, missing_packages

NUM_GPUS = torch.cuda.device_count()
num_frozen_modules = 0

# Older versions of transformers lack what these tests, or what they test, import.
is_too_old = tuple(map(int, metadata.version("transformers").split(".")[:2])) < FIRST_VERSION
collect_ignore = [f"models/test_transformers_{what}.py" for what in ("models", "options")] if is_too_old else []

# A shell starts its background jobs without Ctrl-C, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

if NUM_GPUS == 0:
    os.environ["TRITON_INTERPRET"] = "1"  # read once, when Triton is imported
    # The tests' models are so small that a second thread slows them down, most of all where other programs are running.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # in the processes that tests start

# What takes longest begins first (pytest -n), or one process would still be at it when the others have ended.
LONG_FILES = (
    "test_architectures.py",
    "test_compilation.py",
    "test_chosen_kernels.py",
    "test_requests.py",
    "test_cli.py",
    "test_attention_kernels.py",
    "test_tensor_parallel.py",
    "test_answers.py",
    "test_weight_control.py",
    "test_import_rules.py",
    "test_typing.py",
)

RANDOM_MODEL = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("combinations", "random combinations (test_combinations.py, gpu/test_combinations_gpu.py)")
    group.addoption("--combinations-seconds", type=float, help="how long to try combinations; 0 tries one")
    group.addoption("--combinations-seed", type=int, default=0, help="the seed of the first combination")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand whole files to the processes of `pytest -n`, so that what the tests of a module share is made once.

    All files with tests for GPUs go to one process if there is a GPU, which they would have to share.
    """
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "gpu" if file in gpu_files else file

    tests = config.rootpath / "tests"
    files = [path for path in tests.rglob("test_*.py") if re.search(r"mark\.(multi_)?gpu", path.read_text())]
    gpu_files = {path.relative_to(config.rootpath).as_posix() for path in files} if NUM_GPUS else set()
    config.option.loadscopereorder = False  # the order is that of pytest_collection_modifyitems
    return FileScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG_FILES.index(item.path.name) if item.path.name in LONG_FILES else len(LONG_FILES))
    for item in items:
        if item.get_closest_marker("gpu") and NUM_GPUS < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        if item.get_closest_marker("multi_gpu") and NUM_GPUS < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA GPUs"))
        if item.get_closest_marker("real") and (missing := missing_packages()):
            item.add_marker(pytest.mark.skip(reason=f"needs the packages {', '.join(missing)}: {HOW_TO_INSTALL}"))


@pytest.fixture(autouse=True)
def cheap_garbage_collection() -> None:
    """Every engine collects garbage when it closes, which need not look at all of torch and transformers each time.

    What has lived until now stays: modules, and what the tests of a session share.
    """
    global num_frozen_modules
    if len(sys.modules) > num_frozen_modules + 10:
        gc.collect()
        gc.freeze()
        num_frozen_modules = len(sys.modules)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or Triton reports at exit what was not freed


@contextmanager
def forked_workers() -> Iterator[None]:
    """Fork the workers of engines from a process that has imported PyTorch, because that takes most of their start."""
    if NUM_GPUS > 0 or sys.platform == "win32":
        yield
        return
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["nanoinfer.executor.parallel_runner", "nanoinfer.replicas.replica"])
    with pytest.MonkeyPatch.context() as patch:
        patched = SimpleNamespace(**{**vars(multiprocessing), "get_context": lambda _: server})
        patch.setattr(processes, "multiprocessing", patched)
        yield


@pytest.fixture(scope="module", autouse=True)
def quick_workers() -> Iterator[None]:
    """Without GPUs, and but for some of executor/test_tensor_parallel.py, workers start quicker than those of users."""
    with forked_workers():
        yield


@pytest.fixture(scope="session", autouse=True)
def small_caches() -> Iterator[None]:
    """By default, an engine's KV cache on a CPU would be up to a million blocks of a small model, made one by one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "CPU_CACHE_BYTES", 2**27)
        yield


@pytest.fixture(autouse=True)
def no_traceback_of_slow_tests(request: pytest.FixtureRequest) -> None:
    """After `faulthandler_timeout` all frames would be read while they run, which now and then kills the process."""
    if request.node.get_closest_marker("slow"):
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def log_level_of_before() -> Iterator[None]:
    """The commands set the level of the package's logger; the next test is not to see it."""
    logger = logging.getLogger("nanoinfer")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def show(capfd: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """`show(line)` prints at once, so that it can be read when the process has crashed."""

    def write(line: str) -> None:
        with capfd.disabled():
            print(line, flush=True)

    return write


@pytest.fixture
def llm(shared: Any) -> Iterator[Any]:
    """The module's `shared` engine with an empty prefix cache; every test leaves it without requests."""
    shared.reset_prefix_cache()
    yield shared
    assert shared.is_finished()
    assert shared.get_metrics().num_used_blocks == 0


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`random_checkpoint(**overrides)`: the folder of a random float32 Qwen3 without a tokenizer, built once.

    The overrides are options of transformers' Qwen3Config; the rest is RANDOM_MODEL.
    """
    folders: dict[str, Path] = {}

    def build(**overrides: Any) -> Path:
        key = json.dumps(overrides, sort_keys=True)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("checkpoint")
            save_random_checkpoint(folders[key], overrides)
        return folders[key]

    return build


def save_random_checkpoint(folder: Path, overrides: dict[str, Any]) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**{**RANDOM_MODEL, **overrides}))
        # Norms of 1 and biases of 0, as transformers draws them, would hide a norm or a bias that is left out.
        for name, param in model.named_parameters():
            if param.dim() == 1:
                param.normal_(mean=1.0 if name.endswith("norm.weight") else 0.0, std=0.2)
        model.save_pretrained(folder)


@pytest.fixture(scope="session")
def reference_model() -> Callable[[Path], Any]:
    """`reference_model(folder)`: transformers' own model of a checkpoint, in float32 on the CPU, loaded once."""
    models: dict[Path, Any] = {}

    def load(folder: Path) -> Any:
        from transformers import AutoModelForCausalLM

        if folder not in models:
            models[folder] = AutoModelForCausalLM.from_pretrained(folder).float().eval()
        return models[folder]

    return load


@pytest.fixture
def checkpoint_with_nan(random_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A random checkpoint in which token 7 has an embedding of NaN."""
    shutil.copytree(random_checkpoint(), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path
