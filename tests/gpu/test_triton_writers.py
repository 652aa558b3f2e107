"""Cache writers, gather and metadata kernels on a GPU, against the reference and the PyTorch rules."""

import pytest
import torch

from sparse_mla.cache.codec import encode_rows
from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import KV_RECORDS, MXFP8, RecordFormat
from sparse_mla.kernels.contract import allocate_scales
from sparse_mla.kernels.reference.write_compressed import write_compressed as wanted_compressed
from sparse_mla.kernels.reference.write_window import write_window as wanted_window
from sparse_mla.kernels.torch.widen_output import widen_output as wanted_widen
from sparse_mla.kernels.write_contract import WriteCompressedCall, WriteWindowCall
from sparse_mla.metadata.rules import TORCH_RULES, Rows, TopkRows, WindowSpans
from sparse_mla.testing.inputs import plain_rope_table, poisoned_cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
if torch.cuda.is_available():
    pytest.importorskip("triton")
    from sparse_mla.kernels.triton.gather import gather_kernel, gather_rows
    from sparse_mla.kernels.triton.metadata import TRITON_RULES
    from sparse_mla.kernels.triton.widen_output import widen_output, widen_output_kernel
    from sparse_mla.kernels.triton.write_compressed import write_compressed
    from sparse_mla.kernels.triton.write_kernel import write_kernel
    from sparse_mla.kernels.triton.write_window import write_window

RECORDS = pytest.mark.parametrize("record", KV_RECORDS, ids=lambda record: record.name)


def latents(rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(rows, 512, generator=generator)
    values *= torch.exp2(torch.randint(-20, 12, (rows, 1), generator=generator).float())
    values[0, :64] = 0.0
    return values.to(torch.bfloat16)


def storage(cache: PagedCache) -> torch.Tensor:
    """Every byte, padding and guard included."""
    whole = torch.empty(0, dtype=torch.uint8, device=cache.device)
    return whole.set_(cache.pages.untyped_storage()).cpu()


def cache_on(device: str, record: RecordFormat) -> PagedCache:
    return poisoned_cache(
        record, num_pages=9, page_rows=7, page_padding_bytes=96, offset_rows=2, device=device
    )


@RECORDS
@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_writers_are_byte_exact(record: RecordFormat, ratio: int) -> None:
    slots = torch.randperm(63, generator=torch.Generator().manual_seed(ratio))[:41]
    slots[::7] = -1
    positions = torch.randint(4096, (50,), generator=torch.Generator().manual_seed(9))
    rope = plain_rope_table(4096)
    rows = latents(50)
    negative_nan = torch.tensor(-1, dtype=torch.int16).view(torch.bfloat16)
    rows[1, 5], rows[1, 40], rows[2, 70] = torch.nan, negative_nan, torch.inf
    rows[3, 450], rows[3, 500], rows[4, 64:96] = negative_nan, -torch.inf, torch.nan
    caches = []
    for device in ("cuda", "cpu"):
        cache = cache_on(device, record)
        given = [x.to(device) for x in (slots, positions, rope)]
        if ratio:
            write = write_compressed if device == "cuda" else wanted_compressed
            write(WriteCompressedCall(rows.to(device), cache, *given, ratio))
        else:
            write = write_window if device == "cuda" else wanted_window
            write(WriteWindowCall(rows.to(device), cache, *given))
        caches.append(storage(cache))
    assert torch.equal(*caches)


@pytest.mark.parametrize("in_place", [False, True])
def test_queries_rotate_in_the_same_launch(in_place: bool) -> None:
    base = torch.randn(5, 64, 512, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    results = []
    for device, write in (("cuda", write_window), ("cpu", wanted_window)):
        q = base.to(device).clone()
        out = q if in_place else torch.full_like(q, torch.nan)
        slots, positions = torch.tensor([3, -1]), torch.tensor([9, 4000, 77, 1, 0])
        given = [x.to(device) for x in (slots, positions, plain_rope_table(4096))]
        write(WriteWindowCall(latents(5).to(device), cache_on(device, MXFP8), *given, q, out))
        results.append(out.cpu())
    assert torch.equal(*results)


@RECORDS
def test_gather_equals_the_codec(record: RecordFormat) -> None:
    from sparse_mla.cache.codec import decode_rows

    cache = cache_on("cuda", record)
    slots = torch.randperm(63, device="cuda")[:40]
    positions = torch.arange(40, device="cuda")
    rope = plain_rope_table(64, device="cuda")
    write_window(WriteWindowCall(latents(40).cuda(), cache, slots, positions, rope))
    wanted = decode_rows(record, *cache.read_rows(slots)).to(torch.bfloat16)
    assert torch.equal(gather_rows(cache, slots), wanted)
    assert not gather_rows(cache, torch.tensor([-1, 63, 2**31 - 1], device="cuda")).any()


@RECORDS
@pytest.mark.parametrize("offset", [0, 3])
def test_many_coarse_rows_quantise_as_the_codec(record: RecordFormat, offset: int) -> None:
    """Values of few bits, so that many quotients are rounding boundaries; also rows at odd addresses."""
    rows = 4000
    generator = torch.Generator().manual_seed(7)
    values = torch.randint(-28, 29, (rows, 512), generator=generator) / 4.0
    values *= torch.exp2(torch.randint(-9, 9, (rows, 32), generator=generator).float()).repeat(
        1, 16
    )
    values[::5] = torch.randn(800, 512, generator=generator) * 3e4
    values[:, 448:] = values[:, :64]  # position 0 turns nothing
    whole = torch.zeros(rows, 512 + 2 * offset, dtype=torch.bfloat16, device="cuda")
    latents = whole[:, offset : offset + 512]
    latents.copy_(values)
    cache = poisoned_cache(record, num_pages=70, page_rows=64, device="cuda")
    slots = torch.randperm(70 * 64, generator=generator)[:rows].cuda()
    positions = torch.zeros(rows, dtype=torch.int64, device="cuda")
    rope = plain_rope_table(16, device="cuda")
    write_window(WriteWindowCall(latents, cache, slots, positions, rope))
    got = cache.read_rows(slots)
    for mine, wanted in zip(got, encode_rows(record, values.to(torch.bfloat16)), strict=True):
        assert torch.equal(mine.cpu(), wanted)


@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("heads_per_group", [1, 8])
def test_fp8_outputs_widen_as_in_pytorch(tokens: int, heads_per_group: int) -> None:
    shape = (tokens, 2, heads_per_group * 512)
    generator = torch.Generator("cuda").manual_seed(1)
    data = torch.randint(256, shape, generator=generator, dtype=torch.uint8, device="cuda")
    scales = allocate_scales(tokens, 2, 4 * heads_per_group, torch.device("cuda"))
    words = torch.randint(0, 250, (*scales.shape, 4), generator=generator, device="cuda")
    scales.copy_(words.to(torch.uint8).view(torch.int32)[..., 0])
    got, wanted = widen_output(data, scales), wanted_widen(data, scales)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))


def test_writer_reaches_past_four_gibibytes() -> None:
    stride = 1_228_800
    padding = stride - 64 * MXFP8.row_bytes
    far = poisoned_cache(
        MXFP8,
        num_pages=2**32 // stride + 4,
        page_rows=64,
        page_padding_bytes=padding,
        device="cuda",
    )
    near = poisoned_cache(MXFP8, num_pages=2, page_rows=64, device="cuda")
    rope, positions = plain_rope_table(64, device="cuda"), torch.arange(3, device="cuda")
    slots = torch.tensor([0, 65, 127], device="cuda")
    write_window(WriteWindowCall(latents(3).cuda(), near, slots, positions, rope))
    for border in (2**31, 2**32):
        first = border // stride
        write_window(WriteWindowCall(latents(3).cuda(), far, slots + first * 64, positions, rope))
        assert torch.equal(far.pages[first : first + 2], near.pages)


def test_nothing_compiles_after_warm_up() -> None:
    kernels = (write_kernel, gather_kernel, widen_output_kernel)
    device = torch.cuda.current_device()

    def compiled() -> int:
        return sum(len(kernel.device_caches[device][0]) for kernel in kernels)

    def run(rows: int, page_rows: int, heads: int) -> None:
        cache = poisoned_cache(MXFP8, num_pages=9, page_rows=page_rows, device="cuda")
        slots = torch.arange(rows, device="cuda") % cache.num_slots
        positions = torch.arange(rows, device="cuda")
        rope = plain_rope_table(4096, device="cuda")
        values = latents(max(rows, 2))[:rows].cuda()
        q = torch.zeros(rows, heads, 512, dtype=torch.bfloat16, device="cuda")
        write_window(WriteWindowCall(values, cache, slots, positions, rope, q, q))
        write_window(WriteWindowCall(values, cache, slots, positions, rope))
        write_compressed(WriteCompressedCall(values, cache, slots, positions, rope, 2))
        gather_rows(cache, slots)
        scales = allocate_scales(rows, heads, 4, torch.device("cuda"))
        widen_output(torch.zeros(rows, heads, 512, dtype=torch.uint8, device="cuda"), scales)

    run(1, 64, 1)
    warm = compiled()
    for rows, page_rows, heads in ((2, 1, 3), (17, 32, 16), (300, 7, 8), (4096, 576, 2)):
        run(rows, page_rows, heads)
    assert compiled() == warm


def test_metadata_kernels_equal_the_rules() -> None:
    counts = torch.tensor([3, 0, 5, 0, 0, 1, 70, 400])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
    seq_lens = (counts + torch.tensor([6, 4, 135, 0, 7, 0, 135, 90])).int()
    table = torch.randperm(8 * 40, generator=torch.Generator().manual_seed(5)).reshape(8, 40).int()
    table[2, 5] = -1
    total = int(starts[-1]) + 4
    window_slots = torch.arange(total)
    window_slots[-4:] = -1
    positions = torch.randint(
        -5, 700, (total, 512), generator=torch.Generator().manual_seed(2)
    ).int()
    positions[:, :4] = torch.tensor([-(2**31), -1, 400, 2**31 - 1]).int()
    results = []
    for device, rules in (("cuda", TRITON_RULES), ("cpu", TORCH_RULES)):
        empty = {"dtype": torch.int32, "device": device}
        rows = Rows(
            torch.full((total,), 99, **empty),
            torch.full((total,), 99, **empty),
            torch.zeros(total, dtype=torch.bool, device=device),
        )
        given = [x.to(device) for x in (starts, seq_lens, window_slots, table, positions)]
        rules.fill_rows(rows, *given[:3])
        got = [rows.requests, rows.positions, rows.is_valid]
        for causal in (True, False):
            indices = torch.full((total, 192), 77, **empty)
            lengths = torch.full((total,), 77, **empty)
            replay = torch.zeros(8, **empty)
            spans = WindowSpans(128, 16, replay, given[0], given[1], causal)
            rules.fill_window(indices, lengths, rows, given[3], spans)
            got += [indices, lengths]
        for ratio in (1, 2):
            slots = torch.full((total,), 77, dtype=torch.int64, device=device)
            visible = torch.full((total,), 77, **empty)
            rules.fill_compressed_slots(slots, rows, given[3], given[2], ratio, 8)
            rules.fill_visible(visible, rows, ratio)
            got += [slots, visible]
        slots, lengths = torch.full((total, 512), 77, **empty), torch.full((total,), 77, **empty)
        topk = TopkRows(given[4], given[3], rows.requests, 8, rows.is_valid, visible)
        rules.fill_topk_slots(slots, lengths, topk)
        results.append([x.cpu() for x in (*got, slots, lengths)])
    for mine, wanted in zip(*results, strict=True):
        assert torch.equal(mine, wanted)
