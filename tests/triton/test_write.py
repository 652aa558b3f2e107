"""The cache writers and the gather in Triton's interpreter: byte for byte as the codec."""

import pytest
import torch

from sparse_mla.cache.records import KV_RECORDS, RecordFormat
from sparse_mla.kernels.contract import allocate_scales
from sparse_mla.kernels.reference.write_compressed import write_compressed as wanted_compressed
from sparse_mla.kernels.reference.write_window import write_window as wanted_window
from sparse_mla.kernels.torch.widen_output import widen_output as wanted_widen
from sparse_mla.kernels.write_contract import WriteCompressedCall, WriteWindowCall
from sparse_mla.testing.inputs import plain_rope_table, poisoned_cache

pytest.importorskip("triton")

from sparse_mla.kernels.triton.gather import gather_rows
from sparse_mla.kernels.triton.widen_output import widen_output
from sparse_mla.kernels.triton.write_compressed import write_compressed
from sparse_mla.kernels.triton.write_window import write_window

RECORDS = pytest.mark.parametrize("record", KV_RECORDS, ids=lambda record: record.name)
ROPE = plain_rope_table(4096)


def latents(rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(rows, 512, generator=generator)
    values *= torch.exp2(torch.randint(-20, 12, (rows, 1), generator=generator).float())
    values[0, :64] = 0.0
    values[1, ::3] = -0.0
    return values.to(torch.bfloat16)


def caches(record: RecordFormat):  # two equal poisoned caches
    return [
        poisoned_cache(record, num_pages=3, page_rows=7, page_padding_bytes=96, offset_rows=2)
        for _ in range(2)
    ]


def whole_storage(cache) -> torch.Tensor:  # every byte, padding and guard included
    return torch.empty(0, dtype=torch.uint8).set_(cache.pages.untyped_storage())


@RECORDS
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_window_writer_is_byte_exact(record: RecordFormat, slot_dtype: torch.dtype) -> None:
    mine, wanted = caches(record)
    slots = torch.tensor([3, -1, 20, 0, 7, -5, 13], dtype=slot_dtype)
    positions = torch.tensor([0, 5, 127, 4095, 2**40, -3, 1000])
    for cache, write in ((mine, write_window), (wanted, wanted_window)):
        write(WriteWindowCall(latents(9), cache, slots, positions, ROPE))
    assert torch.equal(whole_storage(mine), whole_storage(wanted))


@pytest.mark.parametrize("in_place", [False, True])
def test_queries_rotate_in_the_same_launch(in_place: bool) -> None:
    mine, wanted = caches(KV_RECORDS[1])
    slots, positions = torch.tensor([3, -1]), torch.tensor([9, 4000, 77])
    base = torch.randn(3, 5, 576, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    results = []
    for cache, write in ((mine, write_window), (wanted, wanted_window)):
        q = base.clone()[:, :, 32:544]
        out = q if in_place else torch.full((3, 5, 512), torch.nan, dtype=torch.bfloat16)
        write(WriteWindowCall(latents(3), cache, slots, positions, ROPE, q, out))
        results.append(out.clone())
    assert torch.equal(*results)
    assert torch.equal(whole_storage(mine), whole_storage(wanted))


@RECORDS
def test_nan_and_infinity_are_stored_as_the_codec_stores_them(record: RecordFormat) -> None:
    mine, wanted = caches(record)
    rows = latents(6)
    negative_nan = torch.tensor(-1, dtype=torch.int16).view(torch.bfloat16)
    rows[0, 5], rows[0, 40], rows[1, 70] = torch.nan, negative_nan, torch.inf
    rows[2, 100:102] = torch.tensor([-torch.inf, torch.nan])
    rows[3, 450], rows[3, 500], rows[4, 64:96] = negative_nan, torch.inf, torch.nan
    slots, positions = torch.tensor([3, 20, 0, 7, 13, 1]), torch.tensor([0, 5, 127, 0, 9, 1000])
    for cache, write in ((mine, write_window), (wanted, wanted_window)):
        write(WriteWindowCall(rows, cache, slots, positions, ROPE))
    assert torch.equal(whole_storage(mine), whole_storage(wanted))
    data, scales = mine.read_rows(slots)
    if record.value_bits == 8:
        assert [data[0, 5], data[0, 40], data[1, 70]] == [0x7F, 0x7F, 0x7E]
        assert not (data[:, : record.quantised_dims] == 0xFF).any()
    else:
        assert scales[0, [0, 2]].tolist() == [0x7F, 0x7F]
        assert torch.all(data[0, :8] == 0)


@RECORDS
@pytest.mark.parametrize("ratio", [1, 2])
def test_compressed_writer_is_byte_exact(record: RecordFormat, ratio: int) -> None:
    mine, wanted = caches(record)
    slots = torch.tensor([3, 4, 20, -1, 7])
    positions = torch.tensor([1, 2, 4095, 5, 7])
    for cache, write in ((mine, write_compressed), (wanted, wanted_compressed)):
        write(WriteCompressedCall(latents(6), cache, slots, positions, ROPE, ratio))
    assert torch.equal(whole_storage(mine), whole_storage(wanted))


@pytest.mark.parametrize("heads_per_group", [1, 5])
def test_fp8_outputs_widen_as_in_pytorch(heads_per_group: int) -> None:
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(256, (3, 2, heads_per_group * 512), generator=generator, dtype=torch.uint8)
    scales = allocate_scales(3, 2, 4 * heads_per_group, torch.device("cpu"))
    exponents = torch.randint(250, (*scales.shape, 4), generator=generator).to(torch.uint8)
    scales.copy_(exponents.view(torch.int32)[..., 0])
    got, wanted = widen_output(data, scales), wanted_widen(data, scales)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert bool(wanted.isnan().any())


def test_nothing_is_written_without_rows_or_past_the_cache() -> None:
    cache, untouched = caches(KV_RECORDS[0])
    positions = torch.zeros(2, dtype=torch.int64)
    write_window(
        WriteWindowCall(latents(2), cache, torch.empty(0, dtype=torch.int64), positions, ROPE)
    )
    write_window(WriteWindowCall(latents(2), cache, torch.tensor([21, 2**31 - 1]), positions, ROPE))
    assert torch.equal(whole_storage(cache), whole_storage(untouched))


@RECORDS
def test_gather_returns_what_was_written(record: RecordFormat) -> None:
    cache, _ = caches(record)
    slots = torch.tensor([3, 19, 0, 20, 6])
    write_window(WriteWindowCall(latents(5), cache, slots, torch.arange(5), ROPE))
    got = gather_rows(cache, torch.tensor([20, -1, 3, 21, 6, 19, 0, 3, 3]))
    from sparse_mla.cache.codec import decode_rows

    wanted = decode_rows(record, *cache.read_rows(torch.tensor([20, 3, 6, 19, 0, 3, 3])))
    assert torch.equal(got[[0, 2, 4, 5, 6, 7, 8]], wanted.to(torch.bfloat16))
    assert torch.equal(got[[1, 3]], torch.zeros(2, 512, dtype=torch.bfloat16))
