"""Chooses the device and dtype of an engine, and asks the device and its libraries a few questions."""

import importlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.parameter import is_lazy

from nanoinfer.errors import ConfigError

CAPTURE_LOCK = threading.Lock()


def select_device(requested: str) -> torch.device:
    """Return the device that `requested` names; "auto" means CUDA if there is a GPU. Raises ConfigError."""
    if requested == "auto":
        requested = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(requested)
    except RuntimeError:
        device = torch.device("meta")  # a name that PyTorch does not know is refused below, like all but CPU and CUDA
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={requested!r} is not supported; use 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(f"device={requested!r}, and PyTorch sees {count} GPUs; use device='auto' or 'cpu'")
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device


def select_devices(requested: str, count: int, option: str = "") -> list[torch.device]:
    """Return one device for each rank: `count` GPUs, starting with the requested one, or the CPU every time.

    option: what asks for so many, if it is not tensor_parallel_size. Raises ConfigError if there are not enough GPUs.
    """
    first = select_device(requested)
    if first.type == "cpu":
        return [first] * count
    num_gpus = torch.cuda.device_count()
    if first.index + count > num_gpus:
        raise ConfigError(
            f"{option or f'tensor_parallel_size={count}'} needs {count} GPUs, and PyTorch sees {num_gpus}; {first} is "
            f"the first to use; use at most {num_gpus - first.index} in all"
        )
    return [torch.device("cuda", first.index + rank) for rank in range(count)]


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, such as (9, 0) for Hopper; (0, 0) for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def becomes_idle(device: torch.device, seconds: float) -> bool:
    """Wait at most so many seconds until a device has nothing left to do; return whether that is so."""
    if device.type == "cpu":
        return True
    deadline = time.monotonic() + seconds
    stream = torch.cuda.current_stream(device)
    while not (idle := stream.query()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return idle


def select_dtype(requested: str, checkpoint: str, prefers_bfloat16: bool, device: torch.device) -> torch.dtype:
    """Return the dtype that `requested` names.

    "auto" is the checkpoint's on CUDA. On a CPU it is bfloat16 if the CPU multiplies it and the model prefers it; else
    float32. prefers_bfloat16: that of the model's config.
    """
    if requested == "auto" and device.type == "cuda":
        requested = checkpoint
    elif requested == "auto":
        requested = "bfloat16" if prefers_bfloat16 and cpu_multiplies_bfloat16() else "float32"
    dtype: torch.dtype = getattr(torch, requested)
    return dtype


def cpu_multiplies_bfloat16() -> bool:
    """Return whether the CPU has instructions that multiply bfloat16. Others widen it first, which takes longer."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out. On a CPU, PyTorch raises a RuntimeError that only its message tells apart."""
    messages = ("can't allocate memory", "overflow")  # "overflow" is raised for a size beyond any address
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(text in str(error) for text in messages)


def current_device(device: torch.device) -> AbstractContextManager[None]:
    """Make a GPU the current one of this thread for a scope. Other engines in the same thread may use other GPUs."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_device(on_host: Tensor, device: torch.device) -> Tensor:
    """Start a copy to the device without waiting for it; return the tensor itself on a CPU.

    PyTorch keeps the pinned memory until the copy is done, so nothing can overwrite it before; that of `host_array` is
    for the caller to keep.
    """
    return on_host if device.type == "cpu" else on_host.pin_memory().to(device, non_blocking=True)


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that all work given to the current stream so far is done; None on a CPU, where it is."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def numbers_to_device(numbers: list[Any], device: torch.device) -> Tensor:
    """Start a copy of a list of whole numbers, or of equal lists of them, as int64.

    A program may have set a default device, on which `torch.tensor` would make them.
    """
    return to_device(torch.tensor(numbers, dtype=torch.int64, device="cpu"), device)


def host_array(shape: tuple[int, ...], device: torch.device) -> NDArray[np.int32]:
    """Return memory of the host, int32, whose copy to this device takes no detour: pinned where that is a GPU.

    PyTorch may not notice which copies read it, so it must be kept until they are done.
    """
    array: NDArray[np.int32] = torch.empty(
        shape, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda"
    ).numpy()
    return array


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Let PyTorch use `count` CPU threads in this scope; None leaves the number as it is."""
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def computing(device: torch.device, num_threads: int | None) -> Iterator[None]:
    """Compute without gradients on this device, and with so many threads on a CPU, for a scope.

    Autocasting, which a trainer may have turned on around a call, is off in it: the engine chooses its own dtypes.
    """
    casts = torch.is_autocast_enabled(device.type)
    plain = torch.autocast(device.type, enabled=False) if casts else nullcontext()
    with torch.inference_mode(), current_device(device), cpu_threads(num_threads), plain:
        yield


@contextmanager
def compiling(launches: list[Callable[[], object]], device: torch.device) -> Iterator[None]:
    """Run launches of kernels in threads while the scope runs, so that the kernels are compiled; raise what they raise.

    Triton compiles outside Python's lock for the most part. The first launch runs alone, before the scope, since Triton
    sets itself up with its first kernel.
    """

    def run(launch: Callable[[], object]) -> None:
        with computing(device, None):
            launch()

    for launch in launches[:1]:
        run(launch)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = pool.map(run, launches[1:])
        yield
        list(compiled)


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Capture what the scope launches in a CUDA graph, which is not run. pool: the memory of other graphs, to share.

    It waits for the device. PyTorch allows one capture at a time in a process.
    """
    torch.cuda.current_blas_handle()  # of this thread: it cannot be made within a capture
    stream = torch.cuda.current_stream()
    with CAPTURE_LOCK:
        try:
            # Graphs are captured in the middle of a run, too, when the user's other threads may use the GPU.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                yield
        finally:
            torch.cuda.set_stream(stream)  # also where a capture fails at its end


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` the dtype of the parameters that are created in a scope."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def why_not_plain(tensor: Tensor) -> str | None:
    """Return why the values of a user's tensor cannot be copied to a plain tensor; None if they can.

    The text follows "it ", as in "it is sparse". The shape is not looked at: some of these have none.
    """
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # its operators are not PyTorch's own
        return f"is a {type(tensor).__name__}"
    if tensor.is_nested:
        return "is nested"
    if tensor.is_meta or is_lazy(tensor):
        return "has no values (it is on the device meta, or not initialized)"
    return None if tensor.layout is torch.strided else f"has the layout {tensor.layout}"


def import_error(package: str) -> ImportError | None:
    """Return the reason why `package` cannot be imported (it may be built for another PyTorch), or None if it can.

    Raises the ImportError where a module of this package is what cannot be imported: that is no absence but a mistake.
    """
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "nanoinfer":
            raise
        return error
    # Python takes any folder of that name for a package, even an empty one that an incomplete removal has left behind.
    return None if module.__spec__ and module.__spec__.origin else ImportError(f"{package} is an empty folder")


def zeros(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros. On a CPU it takes neither time nor memory until it is written."""
    if device.type != "cpu":
        return torch.zeros(sizes, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(sizes) * dtype.itemsize, np.uint8)).view(dtype).view(sizes)
