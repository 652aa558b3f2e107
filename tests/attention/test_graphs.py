"""Attention captured into a CUDA graph: fixed addresses, padding rows, values changed in place."""

from __future__ import annotations

import pytest
import torch

from sparse_mla.ops.attend import AttendBuffers, AttendOptions, mega_attention
from sparse_mla.testing.inputs import AttendProblem, make_problem

pytestmark = pytest.mark.gpu


def _run(problem: AttendProblem, buffers: AttendBuffers, backend: str) -> None:
    mega_attention(
        problem.q,
        window=problem.window,
        compressed=problem.compressed,
        positions=problem.positions,
        rope=problem.rope,
        sink=problem.sink,
        scale=problem.scale,
        options=AttendOptions(backend=backend),
        buffers=buffers,
    )


def _buffers(problem: AttendProblem) -> AttendBuffers:
    out = problem.allocate_out(fp8=True)
    return AttendBuffers(out.data, out.scales, out.lse, out.max_logits)


@pytest.mark.parametrize("padding", [-1, 0, 7, 2**31 - 1])
def test_captured_at_eight_replayed_with_six(gpu_backend: str, padding: int):
    """Rows 6 and 7 hold -1, 0, stale values or 2**31 - 1; rows 0..5 equal the eager result."""
    problem = make_problem(
        tokens=8,
        heads=64,
        window_keys=128,
        compressed_keys=512,
        lengths="random",
        positions_dtype=torch.int32,
        device="cuda",
    )
    buffers, eager = _buffers(problem), _buffers(problem)
    real = [problem.window, problem.compressed]
    kept = [(keys.indices.clone(), keys.lengths.clone()) for keys in real]
    for keys in real:
        keys.lengths.zero_()  # captured with every row empty
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _run(problem, buffers, gpu_backend)  # compiles outside the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _run(problem, buffers, gpu_backend)
    for turn in range(3):
        for keys, (indices, lengths) in zip(real, kept, strict=True):
            # together: past its own length a row names rows full of NaN
            keys.indices.copy_(indices.roll(turn, 0))
            keys.lengths.copy_(lengths.roll(turn))
        problem.positions.copy_(problem.positions.roll(turn))
        for keys in real:
            keys.indices[6:] = padding
            keys.lengths[6:] = keys.width
        problem.positions[6:] = padding
        graph.replay()
        _run(problem, eager, gpu_backend)
        torch.cuda.synchronize()
        assert not bool(eager.lse[:6].isnan().any())  # else the rows name poison
        assert torch.equal(buffers.data[:6], eager.data[:6])
        assert torch.equal(buffers.scales[:6], eager.scales[:6])
        assert torch.equal(buffers.lse[:6], eager.lse[:6])


def test_a_step_does_not_wait_for_the_device(gpu_backend: str):
    problem = make_problem(tokens=4, heads=16, window_keys=64, device="cuda")
    buffers = _buffers(problem)
    _run(problem, buffers, gpu_backend)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _run(problem, buffers, gpu_backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert bool(torch.isfinite(buffers.lse).all())
