"""`benchmarks/clock_trace.py` and `clock_rate.py` still find their places in the kernels, and what they make compiles. No GPU needed."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sparse_mla.cache.records import MXFP8
from sparse_mla.kernels.hopper.bodies import FEW_HEADS, MANY_HEADS, SOURCE_FOLDER, Body
from sparse_mla.kernels.hopper.build import Variant

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("script", "mark"), [("clock_trace", "stamp("), ("clock_rate", "nanoseconds()")]
)
def test_edited_sources_compile(
    script: str,
    mark: str,
    ptxas: Callable[[Variant, Path], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not (SCRIPTS / f"{script}.py").is_file():
        pytest.skip(f"{script}.py is not here: only the repository has it")
    monkeypatch.syspath_prepend(SCRIPTS)
    edits = importlib.import_module(script).EDITS
    importlib.import_module("clock_trace").edit_folder(SOURCE_FOLDER, tmp_path, edits)
    for name in ("clock_trace", "clock_rate"):
        sys.modules.pop(name, None)
    landed = Body.source
    monkeypatch.setattr(Body, "source", lambda body: landed(body, tmp_path))
    for body, head_tiles in ((FEW_HEADS, 1), (MANY_HEADS, 8)):
        places = [place for name in (body.file, *body.headers) for place in edits.get(name, ())]
        put_in = sum((before + after).count(mark) for before, _, after in places)
        assert put_in > 0
        assert body.source().count(mark) == put_in
        for splits in (1, 2):
            folder = tmp_path / f"{body.file[:-3]}-{splits}"
            folder.mkdir()
            variant = Variant(MXFP8, MXFP8, splits, True, True, False, head_tiles)
            assert "registers" in ptxas(variant, folder)
    assert set(edits) <= {
        name for body in (FEW_HEADS, MANY_HEADS) for name in (body.file, *body.headers)
    }
