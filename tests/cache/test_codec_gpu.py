"""The codec gives a GPU the same bytes and values as a CPU, and skips rows there without a sync."""

import math

import pytest
import torch

from sparse_mla.cache.codec import (
    decode_rows,
    encode_e2m1,
    encode_e4m3,
    encode_rows,
    gather_rows,
    scatter_rows,
    ue8m0_byte,
)
from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import RECORDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ALL = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)


def rows_of(record, n=64):
    generator = torch.Generator().manual_seed(record.row_bytes)
    exponents = torch.randint(-40, 40, (n, 1), generator=generator).float()
    rows = torch.randn(n, record.dim, generator=generator) * exponents.exp2()
    rows[1, 3], rows[2, 70], rows[3] = math.nan, math.inf, 0.0
    rows[4, ::2] = -0.0
    rows[5, -3] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # a NaN with its sign set
    return rows


def test_single_values_are_the_same_bytes():
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (1 << 20,), generator=generator, dtype=torch.int64)
    x = bits.to(torch.int32).view(torch.float32)
    for encode in (encode_e4m3, encode_e2m1):
        assert torch.equal(encode(x.cuda()).cpu(), encode(x))
    for limit, floor in ((448.0, 1e-4), (6.0, 6 * 2.0**-126)):
        amax = x.abs()
        assert torch.equal(
            ue8m0_byte(amax.cuda(), limit, floor).cpu(), ue8m0_byte(amax, limit, floor)
        )


@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_the_same_bytes_and_values(record, dtype):
    rows = rows_of(record).to(dtype)
    data, scales = encode_rows(record, rows)
    got_data, got_scales = encode_rows(record, rows.cuda())
    assert torch.equal(got_data.cpu(), data)
    assert torch.equal(got_scales.cpu(), scales)
    got = decode_rows(record, got_data, got_scales, dtype).cpu()
    wanted = decode_rows(record, data, scales, dtype)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))


@ALL
def test_scatter_and_gather_skip_invalid_slots_without_a_sync(record):
    rows = rows_of(record, 6).nan_to_num(1.0, 1.0, 1.0)
    for slots in ([34, 0, -1, 7, 35, 13], [-1, -1, 2**31 - 1, -5, 99, -1], [-1, 3, 4, 5, 6, 8]):
        wanted = PagedCache.allocate(record, num_pages=5, page_rows=7)
        wanted.pages.fill_(0xA5)
        got = PagedCache.allocate(record, num_pages=5, page_rows=7, device="cuda")
        got.pages.fill_(0xA5)
        inside = torch.tensor([slot if slot < 35 else -1 for slot in slots], dtype=torch.int32)
        scatter_rows(wanted, inside, rows)
        given, there = torch.tensor(slots, dtype=torch.int32, device="cuda"), rows.cuda()
        encode_rows(record, there)  # builds the tables
        gather_rows(got, given)
        torch.cuda.set_sync_debug_mode("error")
        try:
            scatter_rows(got, given, there)
            values = gather_rows(got, given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(got.pages.cpu(), wanted.pages)
        assert torch.equal(values.cpu(), gather_rows(wanted, inside))
