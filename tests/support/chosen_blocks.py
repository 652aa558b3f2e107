"""Which block of heads a Hopper call runs in, by `kernels.hopper.bodies`: expected without a GPU, run on one."""

CHOSEN = [  # heads, tokens, heads of a block
    *((64, 1, 8), (64, 3, 16), (64, 8, 16), (64, 20, 16), (64, 32, 64)),
    *((128, 1, 8), (128, 3, 16), (128, 8, 16), (128, 32, 64)),
    *((33, 1, 8), (33, 3, 8), (33, 20, 16), (33, 32, 16)),
    *((100, 1, 8), (100, 3, 16), (100, 8, 16), (100, 32, 64)),
]
