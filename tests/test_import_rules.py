"""Who may import whom, read from the sources; and what importing the package must not bring in."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nanoinfer

PACKAGE = Path(nanoinfer.__file__).parent

# A module, or all modules of a folder -> what it may import from the package. The longest name that fits decides.
MAY_IMPORT = {
    "errors": [],
    "config": ["errors", "utils.hub"],  # to read JSON as the loader does
    "outputs": ["errors"],
    "sampling_params": ["errors"],
    "utils": ["errors", "utils"],
    "utils.prompts": ["errors", "sampling_params"],
    "kernels": ["kernels", "utils.symmetric_memory"],
    "layers": ["config", "errors", "kernels", "layers", "utils"],
    "models": ["config", "errors", "layers", "models", "utils"],
    "engine": [],
    "engine.sequence": ["sampling_params"],
    "engine.block_manager": ["engine.sequence"],
    "engine.batch": ["engine.sequence"],
    "engine.scheduler": ["engine.batch", "engine.block_manager", "engine.sequence"],
    "engine.request": ["engine.sequence", "outputs", "utils"],
    "engine.kv_cache": ["config", "errors", "utils"],
    "engine.device_state": ["engine.batch", "layers", "utils"],
    "engine.special_rows": ["engine.batch", "engine.device_state", "layers", "models"],
    "engine.cuda_graphs": ["engine.device_state"],
    "engine.model_runner": [
        "config",
        "engine.batch",
        "engine.cuda_graphs",
        "engine.device_state",
        "engine.kv_cache",
        "engine.special_rows",
        "errors",
        "layers",
        "models",
        "utils",
    ],
    "engine.executor": ["config", "engine.batch", "engine.model_runner", "errors", "utils"],
    "engine.llm_engine": [
        "config",
        "engine.batch",
        "engine.block_manager",
        "engine.executor",
        "engine.model_runner",
        "engine.request",
        "engine.scheduler",
        "engine.sequence",
        "errors",
        "outputs",
        "sampling_params",
        "utils",
    ],
    "llm": [
        "config",
        "engine.llm_engine",
        "errors",
        "outputs",
        "sampling_params",
        "utils.chat",
        "utils.prompts",
        "utils.workers",
    ],
    "__init__": ["errors", "llm", "outputs", "sampling_params"],
    "batch_job": ["errors", "llm", "outputs", "sampling_params", "utils"],
    "__main__": ["batch_job", "config", "errors", "llm"],
    "assets": ["assets"],
}
WITHOUT_TORCH = ["engine.scheduler", "engine.block_manager", "engine.batch", "engine.sequence", "utils.shm_channel"]
CUDA_ONLY = ("kernels.", "layers.flash_attention", "layers.triton_attention")


def module_name(path: Path) -> str:
    """nanoinfer/engine/batch.py -> engine.batch; nanoinfer/engine/__init__.py -> engine."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def lies_in(name: str, place: str) -> bool:
    """Whether `name` is the module or folder `place`, or something in it."""
    return name == place or name.startswith(f"{place}.")


def imported_names(source: str) -> Iterator[str]:
    """The full dotted name of everything that a source imports, anywhere in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def forbidden_imports(name: str, source: str) -> list[str]:
    place = max((place for place in MAY_IMPORT if lies_in(name, place)), key=len)
    allowed = [f"nanoinfer.{target}" for target in MAY_IMPORT[place]]
    ours = (imported for imported in imported_names(source) if lies_in(imported, "nanoinfer"))
    return [imported for imported in ours if not any(lies_in(imported, target) for target in allowed)]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_what_its_place_allows(name: str) -> None:
    assert any(lies_in(name, place) for place in MAY_IMPORT), f"{name} has no rule: enter it in MAY_IMPORT"
    assert forbidden_imports(name, MODULES[name].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_the_planning_half_of_the_engine_does_without_torch(name: str) -> None:
    names = imported_names(MODULES[name].read_text(encoding="utf-8"))
    assert [imported for imported in names if lies_in(imported, "torch")] == []


@pytest.mark.parametrize(
    ("name", "source", "forbidden"),
    [
        ("errors", "import nanoinfer.config", ["nanoinfer.config"]),
        ("layers.linear", "from nanoinfer.engine.batch import pack", ["nanoinfer.engine.batch.pack"]),
        ("layers.linear", "from nanoinfer import engine", ["nanoinfer.engine"]),
        ("layers.linear", "def f():\n    import nanoinfer.engine", ["nanoinfer.engine"]),
        ("engine.scheduler", "from nanoinfer.engine.sequence import Sequence", []),
        ("engine.sequence", "from nanoinfer.engine import scheduler", ["nanoinfer.engine.scheduler"]),
        ("llm", "from nanoinfer.assets import tiny_chat", ["nanoinfer.assets.tiny_chat"]),
        ("utils.loader", "from nanoinfer.errors_of_others import x", ["nanoinfer.errors_of_others.x"]),
    ],
)
def test_the_rules_find_what_breaks_them(name: str, source: str, forbidden: list[str]) -> None:
    assert forbidden_imports(name, source) == forbidden


def run_python(source: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", source],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_the_package_brings_in_no_heavy_library() -> None:
    source = "import sys, nanoinfer; print([m for m in ('torch', 'transformers', 'triton') if m in sys.modules])"
    assert run_python(source) == "[]"


def test_the_public_names_are_there_and_llm_is_imported_when_asked_for() -> None:
    source = (
        "import sys, nanoinfer; before = 'torch' in sys.modules; "
        "[getattr(nanoinfer, name) for name in nanoinfer.__all__]; print(before, 'torch' in sys.modules)"
    )
    assert run_python(source) == "False True"
    with pytest.raises(AttributeError, match="module 'nanoinfer' has no attribute 'LLMs'"):
        nanoinfer.LLMs  # noqa: B018


def test_every_module_of_the_cpu_path_imports_without_triton_and_flash_attn() -> None:
    """Two of them run, too: an operator that has a kernel, and the sampler."""
    on_cpu = [
        name
        for name in MODULES
        if name != "__init__" and not lies_in(name, "assets") and not name.startswith(CUDA_ONLY)
    ]
    assert "engine.model_runner" in on_cpu
    lines = [
        "import sys",
        "sys.modules['triton'] = sys.modules['flash_attn'] = None",
        *(f"import nanoinfer.{name}" for name in on_cpu),
        "import torch",
        "one = torch.ones(1, 2)",
        "gated = nanoinfer.layers.activation.silu_and_mul(one)",
        "ids = nanoinfer.sampling.gumbel_max.sample(one, one[0, :1], one[0, :1].long(), one[0, :1].int())",
        "print(gated.shape, ids.shape)",
    ]
    assert run_python("\n".join(lines)) == "torch.Size([1, 1]) torch.Size([1])"
