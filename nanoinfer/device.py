"""Which device and dtype an engine runs on, and scopes in which they apply."""

import importlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from nanoinfer.errors import ConfigError


def select_device(requested: str) -> torch.device:
    """The device that `requested` names; "auto" is CUDA where there is one. Raises ConfigError."""
    if requested == "auto":
        requested = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(requested)
    except RuntimeError:
        device = torch.device("meta")  # no more supported than a name that is not known
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={requested!r} is not supported; use 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(f"device={requested!r}, and PyTorch sees {count} GPUs; use device='auto' or 'cpu'")
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device


def select_devices(requested: str, count: int) -> list[torch.device]:
    """`count` GPUs, one a rank, from the one that `requested` names on; or as often the CPU. Raises ConfigError."""
    first = select_device(requested)
    if first.type == "cpu":
        return [first] * count
    num_gpus = torch.cuda.device_count()
    if first.index + count > num_gpus:
        raise ConfigError(
            f"tensor_parallel_size={count} needs as many GPUs, and PyTorch sees {num_gpus}, of which {first} is the "
            f"first to use; use at most {num_gpus - first.index}"
        )
    return [torch.device("cuda", first.index + rank) for rank in range(count)]


def becomes_idle(device: torch.device, seconds: float) -> bool:
    """Whether a device has nothing left to do within so many seconds."""
    if device.type == "cpu":
        return True
    deadline = time.monotonic() + seconds
    stream = torch.cuda.current_stream(device)
    while not (idle := stream.query()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return idle


def select_dtype(requested: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The dtype that `requested` names; "auto" is the checkpoint's on CUDA, and float32 on a CPU."""
    if requested == "auto":
        requested = checkpoint if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, requested)
    return dtype


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; on a CPU, PyTorch says so in words alone."""
    said = ("can't allocate memory", "overflow")  # the last: a size beyond any address
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(words in str(error) for words in said)


def current_device(device: torch.device) -> AbstractContextManager[None]:
    """Makes a GPU the current one: which that is belongs to the thread, and other engines may use another."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters made in this scope have `dtype`."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def import_error(package: str) -> ImportError | None:
    """Why `package` cannot be imported: it is not installed, say, or was built for another PyTorch."""
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        return error
    # Python takes any folder of that name for a package, one that an incomplete removal left behind too.
    return None if module.__spec__ and module.__spec__.origin else ImportError(f"{package} is an empty folder")
