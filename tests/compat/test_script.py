"""A script written only against FlashMLA's API runs unchanged once the import is replaced."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sparse_mla.compat import flash_mla

SCRIPT = Path(__file__).with_name("flash_mla_script.py")


def load() -> ModuleType:
    """The script, with `flash_mla` being ours."""
    name = "flash_mla_script"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        before = sys.modules.get("flash_mla")
        sys.modules["flash_mla"] = flash_mla
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        finally:
            if before is None:
                del sys.modules["flash_mla"]
            else:
                sys.modules["flash_mla"] = before
    return sys.modules[name]


CASES = tuple(load().cases("cpu"))


@pytest.mark.parametrize("name", CASES)
def test_on_the_cpu(name: str) -> None:
    load().cases("cpu")[name]()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    load().cases("cuda")[name]()


def test_the_script_knows_nothing_else() -> None:
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    imports = {
        line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))
    }
    assert imports == {"__future__", "dataclasses", "flash_mla", "math", "random", "sys", "torch"}
    assert "sparse_mla" not in "\n".join(lines)


def test_the_fused_functions_are_a_module_of_their_own() -> None:
    from sparse_mla.compat.flash_mla.flash_mla_interface import flash_mla_with_kvcache
    from sparse_mla.compat.flash_mla.fused_norm_rope_attn_rope_cast import decode, prefill

    assert flash_mla.fused_norm_rope_attn_rope_cast.decode is decode
    assert flash_mla.fused_norm_rope_attn_rope_cast.prefill is prefill
    assert flash_mla.flash_mla_with_kvcache is flash_mla_with_kvcache


def test_importing_it_touches_no_gpu_and_no_kernel_library() -> None:
    code = """
import json, sys
import torch
before = set(sys.modules)
import sparse_mla.compat.flash_mla
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(json.dumps([sorted(new & {"triton", "cuda", "vllm", "typer"}), torch.cuda.is_initialized()]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[], False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_call_follows_its_inputs() -> None:
    script = load()
    generator = torch.Generator("cuda").manual_seed(0)
    case = script.Case("captured", 4, 2, 64, 128, sink="random")
    cache = script.Cache.make(528, 64, 600, generator)
    indices, _ = script.lists_of(case, cache, 128, generator)
    q = torch.randn(4, 2, 64, 512, generator=generator, device="cuda").bfloat16()
    lengths = torch.full((4,), 128, dtype=torch.int32, device="cuda")

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        schedule, _ = flash_mla.get_mla_metadata()
        return flash_mla.flash_mla_with_kvcache(
            q, cache.view, None, None, 512, schedule, indices=indices, topk_length=lengths
        )

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for turn in range(3):
        q.copy_(q.roll(1, 0))
        lengths.copy_(torch.tensor([0, 5, 64, 128 - turn], dtype=torch.int32))
        graph.replay()
        want, want_lse = call()
        assert torch.equal(out, want)
        assert torch.equal(lse, want_lse)
