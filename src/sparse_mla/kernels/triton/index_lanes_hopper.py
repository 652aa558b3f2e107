"""What the lanes of a warp know and tell each other, for the index scores on Hopper.

A thread of a warpgroup holds parts of two keys. Four threads side by side, a quad, share these two; in the
end the lower two of a quad own the first key's score, and the upper two the second's.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def lane_number():
    """The number of the lane. A scalar to the compiler, though every lane of a warp has its own."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %laneid;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def apply_in_place(value, ASSEMBLY: gl.constexpr):
    """int32 of each thread -> int32, by instructions from $1 to $0 that stay where they stand."""
    return gl.inline_asm_elementwise(
        ASSEMBLY, "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def thread_numbers(LAYOUTS: gl.constexpr):
    """The number of its lane, and of its warp, in each thread: int32 [KEYS / 2, 4]."""
    THREADS: gl.constexpr = LAYOUTS.threads
    HALF: gl.constexpr = LAYOUTS.pieces.shape[0]
    warp = gl.arange(0, HALF, layout=gl.SliceLayout(1, THREADS))[:, None] // 8
    warp = gl.broadcast(warp, gl.full([HALF, 4], 0, gl.int32, THREADS))[0]
    lane = gl.inline_asm_elementwise(  # as a range, it would hold more registers in the loops
        "mov.u32 $0, %laneid;", "=r,r", [warp], dtype=gl.int32, is_pure=True, pack=1
    )
    return lane, warp


@gluon.jit
def everywhere(flag):
    """Whether all lanes of the warp have the flag, an int32."""
    return apply_in_place(
        flag,
        """
{
.reg .pred p;
setp.ne.s32 p, $1, 0;
vote.sync.all.pred p, p, 0xffffffff;
selp.s32 $0, 1, 0, p;
}""",
    )


@gluon.jit
def from_lane(value, lane):
    """What a lane, modulo 32, has as its value, in all of the warp."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;",
        "=r,r,r",
        [value, lane],
        dtype=gl.uint32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def quad_sum(kept, sent):
    """float32 of each thread -> `kept` plus the `sent` of the thread two on, added up in lane pairs."""
    return gl.inline_asm_elementwise(
        """
{
.reg .b32 x;
shfl.sync.bfly.b32 x, $2, 2, 0x1f, 0xffffffff;
add.f32 $0, $1, x;
shfl.sync.bfly.b32 x, $0, 1, 0x1f, 0xffffffff;
add.f32 $0, $0, x;
}""",
        "=&f,f,f",
        [kept, sent],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def warp_max(bits):
    """int32 of each thread -> the largest of its warp."""
    return apply_in_place(bits, "redux.sync.max.s32 $0, $1, 0xffffffff;")


@gluon.jit
def is_upper(lane):
    """Whether a thread is of the upper two of its quad: it owns the second of its keys."""
    return (lane & 2) != 0


@gluon.jit
def own_of(values, lane, LAYOUTS: gl.constexpr):
    """[KEYS] values of both of a thread's keys -> [KEYS / 2, 4], that of the key whose score it owns."""
    COUNT: gl.constexpr = values.shape[0]
    LAYOUT: gl.constexpr = gl.SliceLayout(1, LAYOUTS.threads)
    pair = gl.permute(gl.reshape(values, [COUNT // 16, 2, 8]), [0, 2, 1])
    first, second = gl.split(pair)
    first = gl.convert_layout(gl.reshape(first, [COUNT // 2]), LAYOUT, assert_trivial=True)
    second = gl.convert_layout(gl.reshape(second, [COUNT // 2]), LAYOUT, assert_trivial=True)
    return gl.where(is_upper(lane), second[:, None], first[:, None])
