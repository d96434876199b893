"""Which attention backend serves a device, a dtype and a kind of layer."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TypeVar, cast

import torch

from nanoinfer.caches.cache_groups import LayerPlace
from nanoinfer.caches.kv_cache import KVCache
from nanoinfer.device import compute_capability, import_error
from nanoinfer.errors import ConfigError
from nanoinfer.layers.attention.backend import AttentionBackend, AttentionSpec, Backend, TorchBackend
from nanoinfer.layers.attention.chunked import ChunkedBackend
from nanoinfer.layers.attention.cpu import CpuBackend
from nanoinfer.layers.attention.metadata import MetadataT

FLASH_ATTN = "nanoinfer.layers.attention.flash_attn"  # imports flash-attn's extension, and checks its version
MAX_HEAD_DIM = 256
MAX_GROUP_SIZE = 64
BackendT = TypeVar("BackendT", bound=Backend)


class AttentionBackends:
    """Chooses a backend for each kind of attention layer of a model, and holds those that were chosen.

    requested: the name of a backend, or "auto". block_size: tokens in a block of the cache. in_8_bits: whether the
    cache holds keys and values in 8 bits.
    """

    def __init__(
        self, requested: str, device: torch.device, dtype: torch.dtype, block_size: int, in_8_bits: bool = False
    ) -> None:
        self.requested = requested
        self.device = device
        self.dtype = dtype
        self.block_size = block_size
        self.in_8_bits = in_8_bits
        self._backends: dict[Hashable, Backend] = {}
        self._places: dict[tuple[int, Hashable], LayerPlace] = {}  # of a layer, by block table and spec

    def for_layer(self, spec: AttentionSpec, place: LayerPlace) -> AttentionBackend:
        """Return the backend of layers like this one. Raises ConfigError where none can serve, with the reason."""

        def select() -> AttentionBackend:
            options = self.device, self.dtype, replace(spec, chunk=None), self.block_size, self.in_8_bits
            backend = select_backend(self.requested, *options)
            return ChunkedBackend(spec, spec.chunk, backend, self.block_size) if spec.chunk else backend

        return self.shared(spec, place, select)

    def shared(self, spec: Hashable, place: LayerPlace, select: Callable[[], BackendT]) -> BackendT:
        """Return the one backend of all layers of this spec, which `select` makes for the first of them.

        Attention of another kind than `AttentionSpec` describes has a spec of a class of its own.
        """
        self._places.setdefault((place.table, spec), place)
        if spec not in self._backends:
            self._backends[spec] = select()
        return cast(BackendT, self._backends[spec])

    def plan(self, metadata: MetadataT, cache: KVCache, table: int) -> MetadataT:
        """Return `metadata`, that of a block table, with what backends prepare for the table's layers."""
        for (its_table, spec), place in self._places.items():
            if its_table == table:
                metadata = self._backends[spec].plan(metadata, cache.layer(place))
        return metadata

    @property
    def name(self) -> str:
        """The names of all backends."""
        return " and ".join(sorted({backend.name for backend in self._backends.values()}))

    @property
    def needs_host(self) -> bool:
        """Whether a layer's decode reads lengths on the host, so that a CUDA graph cannot capture a step."""
        return any(backend.needs_host for backend in self._backends.values())

    @property
    def max_row_tokens(self) -> int | None:
        """The most tokens that a decode row may have; None if any number of them."""
        return min((most for backend in self._backends.values() if (most := backend.max_row_tokens)), default=None)

    @property
    def max_prefix_sharers(self) -> int:
        """The most decode rows of one token that layers can read a shared prefix for at once; 0 if none can."""
        return min((rows for backend in self._backends.values() if (rows := backend.max_prefix_sharers)), default=0)


def select_backend(
    requested: str,
    device: torch.device,
    dtype: torch.dtype,
    spec: AttentionSpec,
    block_size: int,
    in_8_bits: bool = False,
) -> AttentionBackend:
    """Return the backend that `requested` names; for "auto", the fastest that serves this device and this layer.

    Raises ConfigError where the requested one cannot, with the reason.
    """

    def obstacle(backend: str) -> str | None:
        return _obstacle(backend, device, dtype, spec, block_size, in_8_bits)

    if requested == "auto":
        requested = next(name for name in ("triton", "flash_attn", "torch") if obstacle(name) is None)
    elif reason := obstacle(requested):
        raise ConfigError(f"attention_backend={requested!r} {reason}, or use attention_backend='auto'")
    if requested == "torch":
        return CpuBackend(spec) if device.type == "cpu" else TorchBackend(spec)
    # What these import is slow to import, or not there.
    if requested == "flash_attn":
        from nanoinfer.layers.attention.flash_attn import FlashAttentionBackend

        return FlashAttentionBackend(spec)
    from nanoinfer.layers.attention.triton import TritonBackend

    # On Hopper our own prefill kernel is faster than flash-attn 2 (docs/performance.md); before, that is not known.
    if torch.cuda.is_available() and compute_capability(device) < (9, 0) and not obstacle("flash_attn"):
        from nanoinfer.layers.attention.flash_attn import FlashAttentionBackend

        return TritonBackend(spec, for_prefill=FlashAttentionBackend(spec))
    return TritonBackend(spec, has_hopper_kernel=_has_hopper_kernel(device, dtype, spec, block_size))


def _has_hopper_kernel(device: torch.device, dtype: torch.dtype, spec: AttentionSpec, block_size: int) -> bool:
    """Whether Hopper's own prefill kernel serves layers like this one."""
    from nanoinfer.ops.common.device_properties import has_hopper_kernels

    is_plain = spec.window is None and not spec.has_sinks and spec.soft_cap is None and spec.causal
    if not is_plain or not has_hopper_kernels(device):
        return False
    from nanoinfer.ops.prefill_attention.hopper import serves

    return serves(spec.head_dim, spec.group_size, block_size, dtype)


def _obstacle(
    backend: str, device: torch.device, dtype: torch.dtype, spec: AttentionSpec, block_size: int, in_8_bits: bool
) -> str | None:
    """Why a backend cannot serve; None where it can."""
    if backend == "torch":
        return None
    if device.type != "cuda":
        return f"runs on CUDA, and device is {device.type!r}; use a GPU"
    modules = {"triton": "triton", "flash-attn": FLASH_ATTN} if backend == "flash_attn" else {"triton": "triton"}
    for package, module in modules.items():
        if error := import_error(module):
            return f"needs the package {package}, which cannot be imported ({error}); install it"
    if torch.cuda.is_available() and compute_capability(device) < (8, 0):
        return f"needs a GPU of compute capability 8.0 or more, and {torch.cuda.get_device_name(device)} has less"
    if dtype == torch.float32:
        return "computes in 16 bits, and dtype is 'float32'; use dtype='bfloat16'"
    if spec.head_dim % 8 != 0 or spec.head_dim > MAX_HEAD_DIM:
        return (
            f"takes a head_dim that is a multiple of 8 up to {MAX_HEAD_DIM}, and the model has {spec.head_dim}; "
            "use another model"
        )
    if backend == "triton" and spec.group_size > MAX_GROUP_SIZE:
        return (
            f"takes at most {MAX_GROUP_SIZE} query heads for a KV head, and the model has {spec.group_size}; "
            "use another model"
        )
    if backend == "flash_attn" and spec.has_sinks:
        return "has no attention sinks, and the model has; leave attention_backend out"
    if backend == "flash_attn" and spec.soft_cap is not None:
        return "caps no scores, and attn_logit_softcapping asks for that; leave attention_backend out"
    if backend == "flash_attn" and in_8_bits:
        return "reads a KV cache in 16 bits alone, and kv_cache_dtype asks for 8; leave kv_cache_dtype out"
    if backend == "flash_attn" and block_size % 256 != 0:
        return f"needs kvcache_block_size to be a multiple of 256, not {block_size}; use 256"
    if backend == "flash_attn" and (reason := _flash_attn_lacks(spec, device, dtype)):
        return f"is a build of flash-attn that lacks what the model needs ({reason}); install another build"
    return None


def _flash_attn_lacks(spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> str | None:
    """What a build of flash-attn answers to a layer that it was built without; None where it serves.

    Builds may leave out head sizes and windows, so each kind of layer is tried once. A window only counts where the
    context is longer.
    """
    from nanoinfer.layers.attention.flash_attn import varlen_attention

    length = 1 if spec.window is None else spec.window + 1
    q = torch.zeros(1, spec.num_heads, spec.head_dim, dtype=dtype, device=device)
    k = torch.zeros(length, spec.num_kv_heads, spec.head_dim, dtype=dtype, device=device)
    cu_query_lens, cu_context_lens = torch.tensor([[0, 1], [0, length]], dtype=torch.int32, device=device)
    try:
        varlen_attention(q, k, k, cu_query_lens, cu_context_lens, None, 1, length, spec)
    except RuntimeError as error:
        return str(error)
    return None
