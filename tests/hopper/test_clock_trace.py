"""`benchmarks/clock_trace.py` still finds its places in the kernel, and what it makes compiles. No GPU needed."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from sparse_mla.cache.records import MXFP8
from sparse_mla.kernels.hopper.bodies import FEW_HEADS, SOURCE_FOLDER, Body
from sparse_mla.kernels.hopper.build import MANY_HEADS, Variant

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "clock_trace.py"


def test_stamped_sources_compile(
    ptxas: Callable[[Variant, Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not SCRIPT.is_file():
        pytest.skip(f"{SCRIPT.name} is not here: only the repository has it")
    spec = importlib.util.spec_from_file_location("clock_trace", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    trace = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(trace)
    trace.stamp_folder(SOURCE_FOLDER, tmp_path)
    landed = Body.source
    monkeypatch.setattr(Body, "source", lambda body: landed(body, tmp_path))
    for body, head_tiles in ((FEW_HEADS, 1), (MANY_HEADS, 0)):
        edits = [trace.EDITS[name] for name in (body.file, *body.headers) if name in trace.EDITS]
        put_in = sum(
            (before + after).count("stamp(") for places in edits for before, _, after in places
        )
        assert body.source().count("stamp(") == put_in
        (tmp_path / body.file[:-3]).mkdir()
        variant = Variant(MXFP8, MXFP8, 1, True, True, False, head_tiles)
        assert "registers" in ptxas(variant, tmp_path / body.file[:-3])
    assert set(trace.EDITS) <= {
        name for body in (FEW_HEADS, MANY_HEADS) for name in (body.file, *body.headers)
    }
