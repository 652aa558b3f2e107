"""`benchmarks/hopper_sources.py` runs versions of the kernels from folders. No GPU needed."""

import importlib
import shutil
from pathlib import Path

import pytest

from sparse_mla.cache.records import MXFP8
from sparse_mla.kernels.hopper.bodies import FEW_HEADS, MANY_HEADS, SOURCE_FOLDER, Body
from sparse_mla.kernels.hopper.build import Variant

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def test_a_version_has_its_own_text_and_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (SCRIPTS / "hopper_sources.py").is_file():
        pytest.skip("hopper_sources.py is not here: only the repository has it")
    monkeypatch.syspath_prepend(SCRIPTS)
    versions = importlib.import_module("hopper_sources")
    for name in ("source", "threads_of"):  # put back after the test
        monkeypatch.setattr(Body, name, getattr(Body, name))
    few, many = (Variant(MXFP8, MXFP8, 1, True, True, False, tiles) for tiles in (1, 8))
    landed = few.threads
    folder = tmp_path / "other"
    shutil.copytree(SOURCE_FOLDER, folder)
    path = folder / FEW_HEADS.file
    path.write_text(path.read_text().replace(f"THREADS = {landed};", "THREADS = 32;"))
    versions.use(folder)
    assert few.threads == 32
    assert "THREADS = 32;" in FEW_HEADS.source()
    assert many.threads == dict(MANY_HEADS.threads)[8]
    versions.use(SOURCE_FOLDER)
    assert few.threads == landed
    assert f"THREADS = {landed};" in FEW_HEADS.source()
