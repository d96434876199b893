"""Which attention backend serves a device, a dtype and the sizes of a model."""

import torch

from nanoinfer.device import import_error
from nanoinfer.errors import ConfigError
from nanoinfer.layers.attention.backend import AttentionBackend
from nanoinfer.layers.attention.torch_reference import TorchBackend

FLASH_ATTN = "nanoinfer.layers.attention.flash_attn"  # imports flash-attn's extension, and checks its version


def select_backend(
    requested: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> AttentionBackend:
    """Return the backend that `requested` names; for "auto", the fastest that serves this device and these sizes.

    Raises ConfigError where the requested one cannot, with the reason.
    """
    names = ("triton", "flash_attn", "torch")
    obstacles = {name: _obstacle(name, device, dtype, head_dim, block_size) for name in names}
    if requested == "auto":
        requested = next(name for name in names if obstacles[name] is None)
    if obstacles[requested] is not None:
        raise ConfigError(f"attention_backend={requested!r} {obstacles[requested]}, or use attention_backend='auto'")
    if requested == "torch":
        return TorchBackend()
    # What these import is slow to import, or not there.
    from nanoinfer.layers.attention.triton import TritonBackend

    if obstacles["flash_attn"] is None:
        from nanoinfer.layers.attention.flash_attn import FlashAttentionBackend

        flash_attn = FlashAttentionBackend()
        return flash_attn if requested == "flash_attn" else TritonBackend(flash_attn)
    from nanoinfer.layers.attention.torch_varlen import VarlenAttention

    return TritonBackend(VarlenAttention())


def _obstacle(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Why a backend cannot serve; None where it can."""
    if backend == "torch":
        return None
    if device.type != "cuda":
        return f"runs on CUDA, and device is {device.type!r}; use a GPU"
    modules = {"triton": "triton", "flash-attn": FLASH_ATTN} if backend == "flash_attn" else {"triton": "triton"}
    for package, module in modules.items():
        if error := import_error(module):
            return f"needs the package {package}, which cannot be imported ({error}); install it"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return f"needs a GPU of compute capability 8.0 or more, and {torch.cuda.get_device_name(device)} has less"
    if dtype == torch.float32:
        return "computes in 16 bits, and dtype is 'float32'; use dtype='bfloat16'"
    if backend == "triton" and head_dim not in (64, 128):
        return f"takes a head_dim of 64 or 128, and the model has {head_dim}; use another model"
    if backend == "flash_attn" and (head_dim % 8 != 0 or head_dim > 256):
        return f"takes a head_dim that is a multiple of 8 up to 256, and the model has {head_dim}; use another model"
    if backend == "flash_attn" and block_size % 256 != 0:
        return f"needs kvcache_block_size to be a multiple of 256, not {block_size}; use 256"
    return None
