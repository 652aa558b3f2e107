"""Tests with vLLM's own classes, on a CPU. They need vLLM (several GB): `make test-vllm`."""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent
if find_spec("vllm") is not None:
    sys.path.insert(0, str(HERE))  # for `fake_hopper`


@pytest.fixture(scope="module", params=["nvfp4_ds_mla", "fp8_ds_mla"])
def engine(request: pytest.FixtureRequest) -> SimpleNamespace:
    """Five layers on caches that vLLM planned and allocated, for both pairs of records."""
    import fake_hopper

    config = fake_hopper.engine_config(request.param)
    layers = fake_hopper.make_layers(config)
    caches = fake_hopper.plan_caches(config)
    return SimpleNamespace(name=request.param, config=config, attention=layers, **vars(caches))
