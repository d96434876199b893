"""Arithmetic of whole numbers, which needs no PyTorch."""


def ceil_div(number: int, divisor: int) -> int:
    """Return number / divisor, rounded up."""
    return -(-number // divisor)
