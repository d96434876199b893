"""Chooses the attention backend for a device, a dtype and a kind of layer."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import torch

from nanoinfer.caches.kv_cache import KVCache
from nanoinfer.caches.kv_cache_layout import LayerPlace
from nanoinfer.device import compute_capability, import_error
from nanoinfer.errors import ConfigError
from nanoinfer.layers.attention.backend import AttentionBackend, AttentionSpec, Backend, TorchBackend
from nanoinfer.layers.attention.chunked import ChunkedBackend
from nanoinfer.layers.attention.cpu import CpuBackend
from nanoinfer.layers.attention.metadata import MetadataT

FLASH_ATTN = "nanoinfer.layers.attention.flash_attn"  # imports flash-attn's extension, and checks its version
MAX_HEAD_DIMS = {"flash_attn": 256, "triton": 512}
MAX_GROUP_SIZE, MAX_WIDE_GROUP_SIZE = 64, 32  # of heads up to 256, and of larger ones
BackendT = TypeVar("BackendT", bound=Backend)


class AttentionBackends:
    """Chooses a backend for each kind of attention layer of a model, and holds those that were chosen.

    requested: the name of a backend, or "auto". block_size: tokens in a block of the cache. in_8_bits: whether the
    cache holds keys and values in 8 bits. places: which part of the cache is a layer's, of each layer with attention,
    in the order of the model; an encoder's layers share one.
    """

    def __init__(
        self,
        requested: str,
        device: torch.device,
        dtype: torch.dtype,
        block_size: int,
        in_8_bits: bool = False,
        places: Sequence[LayerPlace] = (),
    ) -> None:
        self.requested = requested
        self.device = device
        self.dtype = dtype
        self.block_size = block_size
        self.in_8_bits = in_8_bits
        self.places = places
        self._backends: dict[Hashable, Backend] = {}
        self._places: dict[tuple[int, Hashable], LayerPlace] = {}  # of a layer, by block table and spec

    def for_layer(self, spec: AttentionSpec, place: LayerPlace) -> AttentionBackend:
        """Return the backend of layers like this one. Raises ConfigError with the reason if none can serve them."""

        def select() -> AttentionBackend:
            backend = self.select(replace(spec, chunk=None))
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
        """Return the metadata of a block table with the plans of the backends of the table's layers."""
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

    def select(self, spec: AttentionSpec) -> AttentionBackend:
        """Make the backend that was requested for a layer; for "auto", the fastest that serves it on this device.

        Raises ConfigError where the requested one cannot, with the reason.
        """
        name = self.requested
        if name == "auto":
            name = next(name for name in ("triton", "flash_attn", "torch") if self._obstacle(name, spec) is None)
        elif reason := self._obstacle(name, spec):
            raise ConfigError(f"attention_backend={name!r} {reason}, or use attention_backend='auto'")
        if name == "torch":
            return CpuBackend(spec) if self.device.type == "cpu" else TorchBackend(spec)
        # Imported late: what these modules need is slow to import, or not installed.
        if name == "flash_attn":
            from nanoinfer.layers.attention.flash_attn import FlashAttentionBackend

            return FlashAttentionBackend(spec)
        from nanoinfer.layers.attention.triton import TritonBackend

        # On Hopper our own prefill kernel is faster than flash-attn 2 (docs/kernels.md); before, that is not known.
        is_before_hopper = torch.cuda.is_available() and compute_capability(self.device) < (9, 0)
        if is_before_hopper and not self._obstacle("flash_attn", spec):
            from nanoinfer.layers.attention.flash_attn import FlashAttentionBackend

            return TritonBackend(spec, for_prefill=FlashAttentionBackend(spec))
        return TritonBackend(spec, has_hopper_kernel=self.has_hopper_kernel(spec))

    def has_hopper_kernel(self, spec: AttentionSpec) -> bool:
        """Return whether Hopper's own prefill kernel serves layers like this one."""
        from nanoinfer.ops.common.device_properties import has_hopper_kernels

        is_plain = spec.window is None and not spec.has_sinks and spec.soft_cap is None and spec.causal
        if not is_plain or not has_hopper_kernels(self.device):
            return False
        from nanoinfer.ops.prefill_attention.hopper import serves

        return serves(spec.head_dim, spec.group_size, self.block_size, self.dtype)

    def _obstacle(self, backend: str, spec: AttentionSpec) -> str | None:
        """Return why a backend cannot serve; None where it can."""
        if backend == "torch":
            return None
        if reason := self.obstacle_of_device(backend):
            return reason
        largest = MAX_HEAD_DIMS[backend]
        if spec.head_dim % 8 != 0 or spec.head_dim > largest:
            return (
                f"takes a head_dim that is a multiple of 8 up to {largest}, and the model has {spec.head_dim}; "
                "use another model"
            )
        most = MAX_GROUP_SIZE if spec.head_dim <= 256 else MAX_WIDE_GROUP_SIZE
        if backend == "triton" and spec.group_size > most:
            return (
                f"takes at most {most} query heads for a KV head, and the model has {spec.group_size}; use another "
                "model"
            )
        return self._obstacle_of_flash_attn(spec) if backend == "flash_attn" else None

    def obstacle_of_device(self, backend: str) -> str | None:
        """Return why a backend other than PyTorch's cannot run here, whatever the layer is; None where it can."""
        if self.device.type != "cuda":
            return f"runs on CUDA, and device is {self.device.type!r}; use a GPU"
        modules = {"triton": "triton", "flash-attn": FLASH_ATTN} if backend == "flash_attn" else {"triton": "triton"}
        for package, module in modules.items():
            if error := import_error(module):
                return f"needs the package {package}, which cannot be imported ({error}); install it"
        if torch.cuda.is_available() and compute_capability(self.device) < (8, 0):
            gpu = torch.cuda.get_device_name(self.device)
            return f"needs a GPU of compute capability 8.0 or more, and {gpu} has less"
        if self.dtype == torch.float32:
            return "computes in 16 bits, and dtype is 'float32'; use dtype='bfloat16'"
        return None

    def _obstacle_of_flash_attn(self, spec: AttentionSpec) -> str | None:
        """Return what flash-attn lacks for these layers; None if it serves them."""
        if spec.has_sinks:
            return "has no attention sinks, and the model has; leave attention_backend out"
        if spec.soft_cap is not None:
            return "caps no scores, and attn_logit_softcapping asks for that; leave attention_backend out"
        if self.in_8_bits:
            return "reads a KV cache in 16 bits alone, and kv_cache_dtype asks for 8; leave kv_cache_dtype out"
        if self.block_size % 256 != 0:
            return f"needs kvcache_block_size to be a multiple of 256, not {self.block_size}; use 256"
        if reason := _flash_attn_lacks(spec, self.device, self.dtype):
            return f"is a build of flash-attn that lacks what the model needs ({reason}); install another build"
        return None


def _flash_attn_lacks(spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return what a build of flash-attn answers to a layer that it was built without; None where it serves.

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
