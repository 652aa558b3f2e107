"""Random problems: the torch body matches the oracle, whatever the sizes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_mla.cache.records import KV_RECORDS
from sparse_mla.testing.cases import Case, run_case
from sparse_mla.testing.inputs import ProblemSpec

SPECS = st.builds(
    ProblemSpec,
    tokens=st.integers(0, 5),
    heads=st.integers(1, 20).map(lambda n: n if n < 18 else 128 - n),
    window_keys=st.integers(0, 70),
    compressed_keys=st.none() | st.integers(0, 40),
    window_record=st.sampled_from(KV_RECORDS),
    compressed_record=st.sampled_from(KV_RECORDS),
    seed=st.integers(0, 2**31 - 1),
    window_page_rows=st.integers(1, 40),
    compressed_page_rows=st.integers(1, 40),
    hole_probability=st.sampled_from([0.0, 0.1, 0.9]),
    beyond_probability=st.sampled_from([0.0, 0.1]),
    lengths=st.sampled_from(["full", "random", "zero"]),
    pool_rows=st.integers(1, 120),
    named_share=st.floats(0.05, 1.0),
    page_padding_bytes=st.integers(0, 700),
    offset_rows=st.integers(0, 5),
    sink=st.sampled_from(["random", None, float("inf"), float("-inf"), 3.0]),
    key_scale=st.sampled_from([1e-6, 0.1, 1.0, 20.0]),
    outlier_dims=st.sampled_from([0, 4]),
    max_position=st.integers(1, 5000),
    strided=st.booleans(),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(spec=SPECS, fp8=st.booleans(), rotate=st.booleans())
def test_random_problem(spec: ProblemSpec, fp8: bool, rotate: bool):
    result = run_case(Case("random", spec, fp8=fp8, rotate=rotate), "torch", "cpu")
    assert result.passed, result
