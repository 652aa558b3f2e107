"""Our window builder against vLLM's own, field by field, and what it adds."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")

import fake_hopper  # noqa: F401
import torch
from torch import Tensor
from vllm.models.deepseek_v41.sparse_mla import DeepseekV41SparseSWAMetadataBuilder
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

from sparse_mla.cache.records import MXFP8
from sparse_mla.config.topology import LayerKind
from sparse_mla.errors import ArgumentError
from sparse_mla.integrations.vllm.backend import MegaBackend, SparseBackend, WindowBackend
from sparse_mla.integrations.vllm.builders import WindowMetadataBuilder, window_rows

WINDOW = 128


class TheirBuilder(DeepseekV41SparseSWAMetadataBuilder):
    """vLLM's builder without FlashMLA's plans, which need its extension."""

    def build_tile_scheduler(self, num_decode_tokens: int) -> dict[str, None]:
        return dict.fromkeys(("swaonly", "c4a", "c128a", "c1a", "c2a"))


def config_of(num_spec: int = 0, dspark: bool = False) -> SimpleNamespace:
    hf = SimpleNamespace(
        sliding_window=WINDOW,
        compress_ratios=[0, 2, 2, 1, 1, 0],
        index_topk=512,
        num_attention_heads=16,
    )
    spec = None
    if num_spec:
        spec = SimpleNamespace(
            num_speculative_tokens=num_spec,
            use_dspark=lambda: dspark,
            parallel_drafting=False,
            method="dspark" if dspark else "mtp",
        )
    parallel = SimpleNamespace(
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
        cp_kv_cache_interleave_size=1,
        tensor_parallel_size=2,
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf, hf_text_config=hf, max_model_len=4096),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=96, max_num_seqs=8, async_scheduling=False
        ),
        speculative_config=spec,
        num_speculative_tokens=num_spec,
        parallel_config=parallel,
        compilation_config=SimpleNamespace(static_forward_context={}),
        attention_config=SimpleNamespace(),
        kv_transfer_config=None,
        use_v2_model_runner=True,
    )


def spec_of() -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(
        block_size=32,
        num_kv_heads=1,
        head_size=512,
        dtype=torch.uint8,
        sliding_window=WINDOW,
        cache_dtype_str="nvfp4_ds_mla",
        state_content_bytes=MXFP8.row_bytes,
        alignment=512,
        model_version="deepseek_v4",
    )


def batch_of(
    query_lens: list[int], seq_lens: list[int], padding: int = 0, causal: bool = True
) -> Any:
    """A step; padding rows have slot -1 and belong to no request."""
    generator = torch.Generator().manual_seed(sum(seq_lens))
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    total = int(starts[-1]) + padding
    table = torch.randperm(4000, generator=generator)[: len(seq_lens) * 130].view(-1, 130).int() + 1
    slots = torch.arange(total) + 64
    slots[total - padding :] = -1
    positions = torch.zeros(total, dtype=torch.int64)
    for n, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        positions[starts[n] : starts[n + 1]] = torch.arange(length - count, length)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=lengths,
        num_reqs=len(seq_lens),
        num_actual_tokens=total,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=table,
        slot_mapping=slots,
        seq_lens_cpu_upper_bound=lengths.clone(),
        positions=positions,
        causal=causal,
    )


STEPS = {
    "decode": ([1, 1, 1], [5, 200, 131], 0, 0),
    "decode with padding": ([1, 1], [40, 300], 6, 0),
    "prefill": ([30, 20], [30, 400], 0, 0),
    "mixed": ([1, 1, 6, 40], [5, 200, 46, 170], 0, 0),
    "mixed with padding": ([1, 9], [700, 9], 5, 0),
    "speculative": ([3, 1, 4, 7], [10, 7, 300, 7], 0, 5),
    "speculative with an empty request": ([3, 0, 6], [10, 7, 300], 4, 5),
}


def same(name: str, got: object, wanted: object) -> None:
    if isinstance(wanted, Tensor):
        assert isinstance(got, Tensor), name
        assert got.dtype == wanted.dtype, name
        assert torch.equal(got, wanted), name
    else:
        assert got == wanted, name


def assert_same_fields(ours: object, theirs: object) -> None:
    for entry in fields(theirs):  # type: ignore[arg-type]
        same(entry.name, getattr(ours, entry.name), getattr(theirs, entry.name))


def build_both(
    step: str, replay: list[int] | None = None
) -> tuple[Any, Any, WindowMetadataBuilder]:
    query_lens, seq_lens, padding, num_spec = STEPS[step]
    metadata = []
    for cls in (WindowMetadataBuilder, TheirBuilder):
        builder = cls(spec_of(), ["window"], config_of(num_spec), torch.device("cpu"))
        start = None if replay is None else torch.tensor(replay, dtype=torch.int32)
        batch = batch_of(query_lens, seq_lens, padding)
        metadata.append(builder.build(0, batch, replay_start=start))
        if cls is WindowMetadataBuilder:
            ours = builder
    return metadata[0], metadata[1], ours


@pytest.mark.parametrize("step", STEPS)
def test_every_field_equals_vllms_own(step: str) -> None:
    ours, theirs, _ = build_both(step)
    assert_same_fields(ours, theirs)


def test_replayed_prefixes_bound_the_windows_as_vllms_own() -> None:
    ours, theirs, _ = build_both("mixed", replay=[0, 0, 41, 140])
    assert_same_fields(ours, theirs)
    first = ours.num_decode_tokens
    assert ours.row_lens[first:].tolist()[:6] == [0, 1, 2, 3, 4, 5]  # positions 40..45


@pytest.mark.parametrize("step", STEPS)
def test_all_rows_are_one_list_at_a_fixed_address(step: str) -> None:
    ours, theirs, builder = build_both(step)
    rows, lengths = window_rows(ours)
    parts = [theirs.decode_swa_indices[:, 0], theirs.decode_swa_lens]
    if theirs.num_prefill_tokens:
        parts = [
            torch.cat((parts[0], theirs.prefill_swa_indices[:, 0])),
            torch.cat((parts[1], theirs.prefill_swa_lens)),
        ]
    assert torch.equal(rows, parts[0])
    assert torch.equal(lengths, parts[1])
    assert rows.data_ptr() == builder.decode_swa_indices.data_ptr()
    assert lengths.data_ptr() == builder.decode_swa_lens.data_ptr()
    plan = ours.plans[LayerKind.RATIO_2]
    assert set(ours.plans) == set(LayerKind)
    assert (plan.max_tokens, plan.num_heads) == (rows.shape[0], 8)
    assert (plan.window_keys, plan.compressed_keys) == (WINDOW, 512)
    assert ours.plans[LayerKind.WINDOW_ONLY].compressed_keys == 0


def test_a_second_step_leaves_nothing_of_the_first() -> None:
    builder = WindowMetadataBuilder(spec_of(), ["window"], config_of(), torch.device("cpu"))
    builder.build(0, batch_of([1, 1, 30], [700, 900, 30]))
    again = builder.build(0, batch_of([1], [3], padding=3))
    fresh = TheirBuilder(spec_of(), ["window"], config_of(), torch.device("cpu"))
    assert_same_fields(again, fresh.build(0, batch_of([1], [3], padding=3)))
    assert again.row_lens.tolist() == [3, 0, 0, 0]


def test_a_draft_block_sees_itself_and_the_window_before() -> None:
    metadata = []
    for cls in (WindowMetadataBuilder, TheirBuilder):
        builder = cls(spec_of(), ["window"], config_of(5, dspark=True), torch.device("cpu"))
        metadata.append(builder.build(0, batch_of([5, 5], [205, 8], padding=2, causal=False)))
    ours, theirs = metadata
    assert_same_fields(ours, theirs)
    assert ours.rows.shape == (12, 192)
    assert ours.row_lens.tolist() == [133] * 5 + [8] * 5 + [0, 0]
    assert ours.plans[LayerKind.WINDOW_ONLY].window_keys == 192


def test_a_captured_draft_step_is_refreshed_in_place() -> None:
    """vLLM captures with a dummy batch and refreshes the metadata from the same tensors."""
    builder = WindowMetadataBuilder(
        spec_of(), ["window"], config_of(5, dspark=True), torch.device("cpu")
    )
    batch = batch_of([5, 5], [105, 48], causal=False)
    metadata = builder.build(0, batch)
    batch.seq_lens.copy_(torch.tensor([205, 8]))
    builder.update_draft_decode_metadata(metadata)
    assert metadata.row_lens.tolist() == [133] * 5 + [8] * 5


def test_a_draft_block_that_does_not_decode_whole_is_refused() -> None:
    builder = WindowMetadataBuilder(
        spec_of(), ["window"], config_of(5, dspark=True), torch.device("cpu")
    )
    with pytest.raises(ArgumentError, match="beyond the decode threshold"):
        builder.build(0, batch_of([30], [30], causal=False))


def test_metadata_of_another_builder_is_refused() -> None:
    theirs = TheirBuilder(spec_of(), ["window"], config_of(), torch.device("cpu"))
    with pytest.raises(ArgumentError, match="use WindowBackend"):
        window_rows(theirs.build(0, batch_of([1], [3])))


def test_builders_are_fit_for_every_cuda_graph() -> None:
    for backend in (WindowBackend, MegaBackend, SparseBackend):
        assert backend.get_builder_cls()._cudagraph_support is AttentionCGSupport.ALWAYS
