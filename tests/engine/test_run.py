"""The end-to-end invariant of the engine: however requests are batched, cut, preempted or helped by shared
prefixes, each gets what a dense computation of it alone gives."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from sparse_mla.cli.checking import CheckResult, check_requests
from sparse_mla.config.model import ModelConfig
from sparse_mla.engine.run import Engine, EngineOptions, RunReport
from sparse_mla.engine.trace import TraceRequest
from sparse_mla.errors import ArgumentError, OutOfPagesError

WINDOW = 32
LAYERS = (0, 1, 2, 3, 5)
"""One window-only layer, a ratio-2 source and its reader, the candidate source and a consumer."""
FORMATS = ("nvfp4_ds_mla", "fp8_ds_mla", "fp8_ds_mla_v4")


@functools.cache
def shrunken() -> ModelConfig:
    """Layers like 0, 2, 3, 20, 21, 24 of the model; lists of 24 entries."""
    return ModelConfig.deepseek_v41_flash().replace(
        hidden_size=256,
        num_attention_heads=8,
        o_groups=2,
        q_lora_rank=128,
        o_lora_rank=64,
        sliding_window=WINDOW,
        num_hidden_layers=6,
        compress_ratios=(0, 2, 2, 1, 1, 1, 0),
        kv_source_layer_ids=(1, 3),
        index_source_layer_ids=(1, 3, 5),
        candidate_source_layer_id=3,
        candidate_topk_blocks=12,
        candidate_block_size=4,
        index_n_heads=8,
        index_topk=24,
        num_nextn_predict_layers=1,
        max_position_embeddings=4096,
    )


def trace(*lengths: tuple[int, int]) -> list[TraceRequest]:
    return [TraceRequest(*length, 0.0, line) for line, length in enumerate(lengths, 2)]


REQUESTS = trace((70, 2), (37, 3), (1, 1), (45, 2))


def serve(
    requests: list[TraceRequest], check: bool = False, **options: object
) -> tuple[Engine, RunReport, list[Tensor], list[CheckResult]]:
    """Serve requests; return what each got, and the dense check if wanted."""
    fields: dict[str, object] = {
        "layer_ids": LAYERS,
        "replay_tokens": WINDOW,
        "prefix_reuse": False,
    }
    engine = Engine(shrunken(), requests, EngineOptions(**{**fields, **options}))
    recorder = engine.keep(range(len(requests)))
    report = engine.run()
    outputs = [recorder.output(index) for index in range(len(requests))]
    ids = range(len(requests)) if check else ()
    return engine, report, outputs, check_requests(engine, recorder, ids, lambda rows: None)


@functools.cache
def one_shot(kv_cache_dtype: str) -> list[Tensor]:
    """One request at a time, its whole prompt in one step, checked against the dense computation."""
    _, report, outputs, checks = serve(
        REQUESTS, True, kv_cache_dtype=kv_cache_dtype, max_requests=1, max_batched_tokens=512
    )
    assert [step.rows for step in report.steps if step.rows > 1] == [70, 37, 45]
    for check in checks:
        assert check.passed, check.sentence
        assert check.error <= check.bound < 0.2
    assert sum(check.list_entries for check in checks) > 1000
    return outputs


@pytest.mark.parametrize(
    ("kv_cache_dtype", "chunk"),
    [("nvfp4_ds_mla", 1), *((name, chunk) for name in FORMATS for chunk in (7, 64, 512))],
)
def test_batching_does_not_change_a_bit(kv_cache_dtype: str, chunk: int) -> None:
    _, report, outputs, _ = serve(REQUESTS, kv_cache_dtype=kv_cache_dtype, max_batched_tokens=chunk)
    for got, wanted in zip(outputs, one_shot(kv_cache_dtype), strict=True):
        assert torch.equal(got, wanted)
    assert report.rows == sum(request.rows for request in REQUESTS)
    assert max(step.rows for step in report.steps) <= chunk
    assert sum(step.decode_rows for step in report.steps) == 1 + 2 + 0 + 1


def test_preempted_requests_get_the_same() -> None:
    requests = trace((120, 10), (60, 10))
    options = {"layer_ids": (1, 3)}
    _, calm, wanted, _ = serve(requests, **options)
    tight = {"window": 16, "c1": 4, "c2": 4, "ring": 3}
    _, report, outputs, _ = serve(requests, pages=tight, **options)
    assert (calm.preemptions, report.preemptions) == (0, 1)
    assert report.pages_peak["c1"] == 4
    for got, expected in zip(outputs, wanted, strict=True):
        assert torch.equal(got, expected)


PREFIXED = trace((150, 2), (200, 3), (170, 2))
FAMILY = {"shared_prefix_tokens": 140, "families": 1, "max_requests": 1}


@pytest.mark.parametrize(
    ("kv_cache_dtype", "chunk"),
    [("nvfp4_ds_mla", 23), *((name, 512) for name in FORMATS)],
)
def test_an_exact_replay_gives_the_bits_of_a_fresh_run(kv_cache_dtype: str, chunk: int) -> None:
    layers = (0, 1, 3)
    options = {"layer_ids": layers, "kv_cache_dtype": kv_cache_dtype, "max_batched_tokens": chunk}
    _, fresh, wanted, _ = serve(PREFIXED, **FAMILY, **options)
    engine, report, outputs, checks = serve(
        PREFIXED, True, prefix_reuse=True, replay_tokens=len(layers) * WINDOW, **FAMILY, **options
    )
    assert engine.replay_is_exact
    assert [request.hit for request in engine.requests] == [0, 128, 128]
    assert report.reused_tokens == 2 * (128 - 96)
    assert report.rows == fresh.rows - 2 * (128 - 96)
    for request, got, expected in zip(engine.requests, outputs, wanted, strict=True):
        assert torch.equal(got[request.hit :], expected[request.hit :])
    for check in checks:
        assert check.passed, check.sentence


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_a_bounded_replay_is_what_the_dense_computation_says(kv_cache_dtype: str) -> None:
    """Layers above the first miss keys below the replay; the check knows by how much, and only that."""
    options = {"kv_cache_dtype": kv_cache_dtype, "max_batched_tokens": 64, **FAMILY}
    _, _, wanted, _ = serve(PREFIXED, **options)
    engine, report, outputs, checks = serve(PREFIXED, True, prefix_reuse=True, **options)
    assert not engine.replay_is_exact
    assert [(request.hit, request.replay_start) for request in engine.requests[1:]] == [
        (128, 96)
    ] * 2
    assert report.reused_tokens == 192
    assert sum(step.replayed_rows for step in report.steps) == 64
    for check in checks:
        assert check.passed, check.sentence
    difference = (outputs[1][128:] - wanted[1][128:]).norm() / wanted[1][128:].norm()
    assert difference > 2 * checks[1].error, "the plain dense computation would have been refused"
    assert torch.equal(outputs[0], wanted[0])


def test_a_bounded_replay_of_one_layer_is_exact() -> None:
    for layer in (1, 3):
        options = {"layer_ids": (layer,), **FAMILY}
        _, _, wanted, _ = serve(PREFIXED, **options)
        engine, _, outputs, _ = serve(PREFIXED, prefix_reuse=True, **options)
        assert engine.requests[2].hit == 128
        assert torch.equal(outputs[2][128:], wanted[2][128:])


def test_the_check_sees_one_wrong_row() -> None:
    """Swap one row of a page behind the engine's back."""
    requests = trace((120, 2))
    engine = Engine(shrunken(), requests, EngineOptions(layer_ids=(0, 1), max_batched_tokens=64))
    recorder = engine.keep([0])
    engine.step()
    cache = engine.caches.compressed_cache(1)
    page = engine.requests[0].pages["c2"][0]
    row = cache.data_view()[page]
    row[0], row[1] = row[1].clone(), row[0].clone()
    engine.run()
    (check,) = check_requests(engine, recorder, [0], lambda rows: None)
    assert not check.passed
    assert check.error > check.bound


def test_missing_sources_are_added_and_named() -> None:
    engine = Engine(shrunken(), REQUESTS[:1], EngineOptions(layer_ids=(2, 5)))
    assert engine.layer_ids == (1, 2, 3, 5)
    assert engine.added_layer_ids == (1, 3)


def test_same_seed_same_bits_other_seed_other_bits() -> None:
    requests = trace((20, 2))
    first, second, other = (serve(requests, layer_ids=(0,), seed=s)[2][0] for s in (3, 3, 4))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_families_share_their_prefix_only() -> None:
    engine = Engine(
        shrunken(),
        trace((50, 1), (50, 1), (50, 1)),
        EngineOptions(layer_ids=(0,), shared_prefix_tokens=20, families=2),
    )
    rows = [engine.request_hidden(index) for index in range(3)]
    assert torch.equal(rows[0][:20], rows[2][:20])
    assert not torch.equal(rows[0][20], rows[2][20])
    assert not torch.equal(rows[0][0], rows[1][0])


@pytest.mark.parametrize(
    ("requests", "options", "error", "complaint"),
    [
        (
            REQUESTS,
            {"layer_ids": (6,)},
            ArgumentError,
            r"layers: got \[6\].*backbone layers 0\.\.5",
        ),
        (REQUESTS, {"layer_ids": ()}, ArgumentError, "layers: got none"),
        ([], {}, ArgumentError, "number of requests: got 0"),
        (trace((4096, 2)), {}, ArgumentError, "a request of 4097 tokens"),
        (REQUESTS, {"kv_cache_dtype": "int8"}, ArgumentError, "kv_cache_dtype"),
        (REQUESTS, {"max_batched_tokens": 0}, ArgumentError, "max_batched_tokens: got 0"),
        (REQUESTS, {"families": 0}, ArgumentError, "families: got 0"),
        (REQUESTS, {"pages": {"c1": 1}}, OutOfPagesError, "needs 2 pages of group 'c1'"),
        (REQUESTS, {"pages": {"c9": 1}}, ArgumentError, "pages"),
    ],
)
def test_bad_input(
    requests: list[TraceRequest], options: dict[str, object], error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        serve(requests, **options)
