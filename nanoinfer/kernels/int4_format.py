"""How the kernels cut products of weights in 4 bits; for what calls them too. Needs no Triton."""

COLUMNS = 64  # outputs of a tile
