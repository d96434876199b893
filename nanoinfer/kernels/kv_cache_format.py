"""The formats of a KV cache in 8 bits, for the kernel that writes it and for its twin. Needs no Triton."""

import torch

# The largest value of each format. The scale of a vector takes the vector's own largest value there.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
TINY = 1.2e-38  # a scale below it has no reciprocal in float32; what it would scale is rounded to zero
