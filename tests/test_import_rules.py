"""Who may import whom, read from the sources; and what importing the package must not bring in."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nanoinfer

PACKAGE = Path(nanoinfer.__file__).parent

# Each part may import itself and the parts that its line names. Parts are folders, and the files of the top folder.
EVERYBODY = {"errors", "config", "device", "outputs", "sampling_params", "checkpoint"}
STEP_DATA = {"engine.batch", "constraints.rules"}  # what the host says of a step
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "device": {"errors"},
    "outputs": {"errors"},
    "sampling_params": {"errors", "constraints.structured_outputs"},
    "checkpoint": {"errors", "config"},
    "text": EVERYBODY,
    "constraints": EVERYBODY | {"text", "progress"},
    "engine": EVERYBODY | {"text", "constraints", "executor.runner", "control.listener"},
    "kernels": EVERYBODY,
    "distributed": EVERYBODY | {"kernels"},
    "quantization": EVERYBODY | {"kernels", "distributed"},
    "layers": EVERYBODY | {"quantization", "kernels", "distributed"},
    "models": EVERYBODY | {"layers", "quantization", "kernels", "distributed"},
    "sampling": EVERYBODY | STEP_DATA | {"models", "layers", "kernels", "distributed"},
    "runner": EVERYBODY | STEP_DATA | {"sampling", "models", "layers", "kernels", "distributed"},
    "executor": EVERYBODY | STEP_DATA | {"runner", "distributed"},
    "progress": EVERYBODY,
    "scoring": EVERYBODY | {"text"},
    "control": EVERYBODY | {"text", "engine", "executor.runner", "executor.interrupts"},
    "llm": EVERYBODY
    | {"constraints", "control", "engine", "executor", "runner", "models", "text", "progress", "scoring"}
    | {"integrations.async_calls"},
    "__init__": EVERYBODY | {"llm", "constraints.structured_outputs"},
    "batch": EVERYBODY | {"llm", "executor", "text", "progress", "constraints.structured_outputs"},
    "bench": EVERYBODY
    | {
        *nanoinfer.__all__,
        "__version__",
        "control",
        "engine",
        "models",
        "layers",
        "quantization",
        "kernels",
        "distributed",
    },
    "integrations": EVERYBODY | {*nanoinfer.__all__, "llm", "engine", "executor", "text", "progress", "batch"},
    "__main__": EVERYBODY | {*nanoinfer.__all__, "__version__", "batch", "bench"},
}
WITHOUT_TORCH = {"constraints", "engine", "executor.runner", "control.listener", "config", "sampling_params"}
WITHOUT_TORCH |= {"outputs", "errors"}
CUDA_ONLY = ("kernels.", "distributed.copy_engines", "layers.attention.flash_attn", "layers.attention.triton")


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
    part = name.partition(".")[0]
    allowed = MAY_IMPORT[part] | {part}
    ours = [found.removeprefix("nanoinfer.") for found in imported_names(source) if lies_in(found, "nanoinfer")]
    return [found for found in ours if not any(lies_in(found, place) for place in allowed)]


@pytest.mark.parametrize("name", [name for name in MODULES if not lies_in(name, "assets")])
def test_imports_go_down_from_part_to_part(name: str) -> None:
    assert forbidden_imports(name, MODULES[name].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", [name for name in MODULES if any(lies_in(name, part) for part in WITHOUT_TORCH)])
def test_the_planning_half_of_the_engine_does_without_torch(name: str) -> None:
    names = imported_names(MODULES[name].read_text(encoding="utf-8"))
    assert [imported for imported in names if lies_in(imported, "torch")] == []


def test_nothing_imports_the_benchmark_but_the_command_line() -> None:
    importers = [name for name, allowed in MAY_IMPORT.items() if "bench" in allowed]
    assert importers == ["__main__"]


def test_nothing_imports_the_integrations() -> None:
    assert [name for name, allowed in MAY_IMPORT.items() if "integrations" in allowed] == []


@pytest.mark.parametrize(
    ("name", "source", "forbidden"),
    [
        ("errors", "import nanoinfer.config", ["config"]),
        ("layers.linear", "from nanoinfer.engine.batch import pack", ["engine.batch.pack"]),
        ("layers.linear", "def f():\n    import nanoinfer.engine", ["engine"]),
        ("runner.memory", "from nanoinfer.engine import scheduler", ["engine.scheduler"]),
        ("runner.memory", "from nanoinfer.engine.batch import pack", []),
        ("checkpoint.loader", "from nanoinfer.errors_of_others import x", ["errors_of_others.x"]),
    ],
)
def test_the_rules_find_what_breaks_them(name: str, source: str, forbidden: list[str]) -> None:
    assert forbidden_imports(name, source) == forbidden


def run_python(source: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", source], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


# Each of these takes half a second or more to import. torch._dynamo alone brings in the three after it.
HEAVY = {
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.attention.varlen",
    "transformers.modeling_utils",
    "transformers.generation",
    "transformers.models.auto.tokenization_auto",
    "flash_attn",
    "triton",
    "sklearn",
    "scipy",
    "pandas",
    "torchvision",
}
FIRST_ANSWER = """
import sys, nanoinfer
print(*sys.modules)
[getattr(nanoinfer, name) for name in nanoinfer.__all__]
print(*(after_import := {*sys.modules}))
from concurrent.futures import ThreadPoolExecutor
from nanoinfer.text.tokenizer import load_tokenizer
ThreadPoolExecutor(1).submit(load_tokenizer, nanoinfer.tiny_model_path()).result()
print(*{*sys.modules} - after_import)
with nanoinfer.LLM(nanoinfer.tiny_model_path(), device="cpu") as llm:
    messages = [{"role": "user", "content": "12+34=?"}]
    [output] = llm.chat(messages, nanoinfer.SamplingParams(max_tokens=2), use_tqdm=False)
print(*sys.modules)
"""


def test_a_first_answer_brings_in_no_heavy_library() -> None:
    """What PyTorch itself imports counts too, hence the high limits: they find a library more, not a module."""
    package, names, tokenizer, answer = (line.split() for line in run_python(FIRST_ANSWER).splitlines())
    assert {"torch", "transformers", "tokenizers", "triton", "numpy", "tqdm"}.isdisjoint(package)
    assert len(package) < 150
    assert "torch" in names, "LLM is imported when it is asked for"
    assert {"transformers", "tokenizers"}.isdisjoint(names), "they are imported beside the weights"
    assert len(names) < 1600
    assert not [name for name in tokenizer if name.startswith("torch")], "two threads would import PyTorch"
    assert HEAVY.isdisjoint(answer)
    assert len(answer) < 2200


def test_a_name_that_the_package_has_not_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'nanoinfer' has no attribute 'LLMs'"):
        nanoinfer.LLMs  # noqa: B018


def test_every_module_of_the_cpu_path_imports_without_triton_and_flash_attn() -> None:
    """Two of them run, too: an operator that has a kernel, and the sampler."""
    on_cpu = [
        name for name in MODULES if name != "__init__" and not name.startswith(("assets", "integrations.", *CUDA_ONLY))
    ]
    assert "runner.model_runner" in on_cpu
    lines = [
        "import sys",
        "sys.modules['triton'] = sys.modules['flash_attn_2_cuda'] = None",
        *(f"import nanoinfer.{name}" for name in on_cpu),
        "import torch",
        "one = torch.ones(1, 2)",
        "gated = nanoinfer.layers.activation.silu_and_mul(one)",
        "ids = nanoinfer.sampling.gumbel_max.sample(one, one[0, :1], one[0, :1].long(), one[0, :1].int())",
        "print(gated.shape, ids.shape)",
    ]
    assert run_python("\n".join(lines)) == "torch.Size([1, 1]) torch.Size([1])"
