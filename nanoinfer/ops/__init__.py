"""Computes on tensors: each operation has a folder with its specification and its kernels."""

import os

# Kernels are tested with products and sums fused. Triton does so unless told otherwise, but from 3.10 on it will not.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
