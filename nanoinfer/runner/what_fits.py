"""Says, in an error, what takes the memory of a GPU that is too small, and which options would make room."""

import torch

from nanoinfer.caches.block_layout import is_8_bit
from nanoinfer.models.implementations import bytes_in_4_bits, weight_bytes
from nanoinfer.models.interface import Model
from nanoinfer.runner.memory import GIB, MemoryUse
from nanoinfer.runner.setup import Setup


def explain(setup: Setup, model: Model, use: MemoryUse) -> str:
    """Return sentences on what takes the memory of a GPU, and on what would make room. model: may lie on "meta"."""
    config, weights, num_gpus = setup.model_config, weight_bytes(model), torch.cuda.device_count()
    taken = {
        "the weights take": weights,
        "what else is loaded takes": use.loaded - weights,
        "the largest step takes": use.step,
        "CUDA graphs take": use.graphs,
    }
    takes = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in taken.items() if size > 0)
    remedies = []
    if (in_4_bits := bytes_in_4_bits(model, config)) is not None:
        remedies.append(f"quantization='int4' or a checkpoint in 4 bits (weights of {in_4_bits / GIB:.2f} GiB)")
    if not is_8_bit(setup.kv_cache_dtype) and config.latent_attention is None and not config.is_encoder:
        remedies.append("kv_cache_dtype='int8' (nearly twice the tokens in a cache)")
    if use.graphs:
        remedies.append("enforce_eager=True (no CUDA graphs)")
    if num_gpus > setup.tp.size:
        remedies.append(f"tensor_parallel_size={num_gpus} (a share of the weights on each GPU)")
    remedies.append("device='cpu' (the memory of the host)")
    granted = f"Of {use.granted / GIB:.2f} GiB that gpu_memory_utilization={setup.config.gpu_memory_utilization:g}"
    return f"{granted} grants on {setup.device}, {takes}. What makes room: {', '.join(remedies)}"
