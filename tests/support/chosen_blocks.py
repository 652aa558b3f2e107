"""Which block of heads a Hopper call runs in, by `kernels.hopper.bodies`: expected without a GPU, run on one."""

CHOSEN = [  # heads, tokens, heads of a block
    *((64, 1, 8), (64, 4, 16), (64, 13, 16), (64, 20, 32), (64, 34, 64)),
    *((128, 1, 8), (128, 3, 16), (128, 10, 32), (128, 32, 64)),
    *((33, 1, 8), (33, 10, 16), (33, 32, 32), (33, 50, 64), (20, 40, 32), (12, 40, 16)),
    *((100, 1, 8), (100, 5, 16), (100, 12, 32), (100, 32, 64)),
]
