"""The formats of a KV cache in 8 bits, for the kernel that writes it and for its twin. Needs no Triton."""

import torch

from nanoinfer.ops.common.fp8_format import FP8, FP8_MAX

# The largest value of each format. The scale of a vector takes the vector's own largest value there.
LARGEST = {FP8: FP8_MAX, torch.int8: 127.0}
