"""Pools: which cache a layer gets, disjoint bytes, and moving a request by `buffers()` alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_mla.cache.codec import decode_rows, encode_rows, gather_rows, scatter_rows
from sparse_mla.cache.kv_dtype import KV_CACHE_DTYPES, resolve_kv_cache_dtype
from sparse_mla.cache.pool import CachePool
from sparse_mla.config.model import ModelConfig
from sparse_mla.config.topology import layer_topology
from sparse_mla.errors import ArgumentError, IndexRangeError, OutOfPagesError

CFG = ModelConfig.deepseek_v41_flash()
DTYPES = ("nvfp4_ds_mla", "fp8_ds_mla", "fp8_ds_mla_v4")
SOME_LAYERS = (0, 2, 3, 14, 20, 21, 24)
RATIO_2 = range(2, 20)


def caches_of(pool):
    """(group, layer, cache) of every paged cache."""
    for group in pool.groups.values():
        for member in group.members:
            reader = {
                "window": pool.window_cache,
                "compressed": pool.compressed_cache,
                "index": pool.index_cache,
            }.get(member.role)
            if reader is not None:
                yield group, member, reader(member.layer_id)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_whole_model(dtype):
    pool = CachePool.allocate(CFG, pages=3, kv_cache_dtype=dtype)
    records = resolve_kv_cache_dtype(dtype)
    assert pool.records == records
    sizes = {
        name: (g.page_rows, g.tokens_per_page, len(g.members)) for name, g in pool.groups.items()
    }
    assert sizes == {
        "window": (32, 32, 43),
        "c1": (64, 64, 2),
        "c2": (32, 64, 6),
        "ring": (8, 8, 3),
    }
    assert {name: g.ratio for name, g in pool.groups.items()} == {
        "window": 0,
        "c1": 1,
        "c2": 2,
        "ring": 0,
    }
    for layer_id in range(CFG.num_layers):
        window = pool.window_cache(layer_id)
        assert (window.record, window.page_rows, window.num_pages) == (records.window, 32, 3)
        source = layer_topology(CFG, layer_id).kv_source
        if source is None:
            continue
        compressed, index = pool.compressed_cache(layer_id), pool.index_cache(layer_id)
        assert compressed is pool.compressed_cache(source)
        assert index is pool.index_cache(source)
        assert (compressed.record, index.record) == (records.compressed, records.index)
        assert compressed.page_rows == index.page_rows == (32 if layer_id in RATIO_2 else 64)
    for layer_id in (2, 8, 14):
        assert pool.ring(layer_id).shape == (3, 8, 1024)
        assert pool.ring(layer_id).dtype is torch.float32
    assert pool.num_bytes == sum(3 * group.block_bytes for group in pool.groups.values())
    assert pool.device.type == "cpu"


@pytest.mark.parametrize(
    ("dtype", "window", "c1", "c2", "ring"),
    [
        ("nvfp4_ds_mla", 43 * 16896, 18432 + 4608, 123 * 288, 98304),
        ("fp8_ds_mla", 43 * 16896, 81 * 528, 123 * 528, 98304),
        ("fp8_ds_mla_v4", 43 * 19008, 37440 + 8640, 3 * (19008 + 4608), 98304),
    ],
)
def test_block_bytes(dtype, window, c1, c2, ring):
    pool = CachePool.allocate(CFG, pages=1, kv_cache_dtype=dtype)
    got = {name: group.block_bytes for name, group in pool.groups.items()}
    assert got == {"window": window, "c1": c1, "c2": c2, "ring": ring}


def test_every_name_resolves_in_a_pool():
    for name in KV_CACHE_DTYPES:
        pool = CachePool.allocate(CFG, pages=1, kv_cache_dtype=name, layer_ids=[0])
        assert pool.records == resolve_kv_cache_dtype(name)
    records = resolve_kv_cache_dtype("fp8", index_dtype="mxfp4")
    assert (
        CachePool.allocate(CFG, pages=1, kv_cache_dtype=records, layer_ids=[0]).records == records
    )


@given(
    dtype=st.sampled_from(DTYPES),
    block_size=st.sampled_from([2, 6, 16, 64, 66, 128, 256]),
    window_page_rows=st.sampled_from([1, 2, 16, 32, 33]),
    blocks=st.integers(1, 4),
    spec=st.integers(0, 8),
    layers=st.sampled_from([(0,), (2, 3), (20,), SOME_LAYERS, (0, 41)]),
)
@settings(max_examples=40, deadline=None)
def test_members_are_disjoint_aligned_and_inside_the_block(
    dtype, block_size, window_page_rows, blocks, spec, layers
):
    pool = CachePool.allocate(
        CFG,
        pages=blocks,
        kv_cache_dtype=dtype,
        block_size=block_size,
        window_page_rows=window_page_rows,
        layer_ids=layers,
        num_spec_tokens=spec,
    )
    for group in pool.groups.values():
        end = 0
        for member in group.members:
            assert member.offset_bytes >= end
            end = member.offset_bytes + member.page_bytes
        assert end <= group.block_bytes
    for group, member, cache in caches_of(pool):
        record = cache.record
        assert cache.page_stride_bytes in (group.block_bytes, member.page_bytes)
        assert group.block_bytes % record.stride_multiple_bytes == 0
        assert (
            member.offset_bytes % record.page_alignment_bytes == 0 or record is pool.records.index
        )
        assert cache.pages.data_ptr() % record.row_alignment_bytes == 0
        cache.check_strides()
    # every cache writes its own number into all of its bytes; then every cache still holds its own
    views = [cache.pages for _, _, cache in caches_of(pool)]
    views += [info.pages for info in pool.buffers() if info.name.endswith("ring")]
    for number, view in enumerate(views, start=1):
        view.fill_(number)
    for number, view in enumerate(views, start=1):
        assert view.eq(number).all()
    written = sum(int(arena.ne(0).sum()) for arena in pool.arenas.values())
    assert written == sum(view.numel() for view in views)


def test_a_subset_of_layers():
    pages = {"window": 5, "c1": 2, "c2": 3, "ring": 4}
    pool = CachePool.allocate(CFG, pages=pages, layer_ids=SOME_LAYERS)
    assert {name: group.num_blocks for name, group in pool.groups.items()} == pages
    assert [member.name for member in pool.groups["c2"].members] == [
        "layers.2.compressed", "layers.2.index", "layers.14.compressed", "layers.14.index",
    ]  # fmt: skip
    assert [member.layer_id for member in pool.groups["ring"].members] == [2, 14]
    assert pool.compressed_cache(24) is pool.compressed_cache(20)
    window_only = CachePool.allocate(CFG, pages=2, layer_ids=[0, 1, 40])
    assert list(window_only.groups) == ["window"]


def test_rings_are_separate_float32_rows_in_one_arena():
    pool = CachePool.allocate(CFG, pages=4, layer_ids=(2, 8, 14), num_spec_tokens=7)
    rings = [pool.ring(layer_id) for layer_id in (2, 8, 14)]
    for number, ring in enumerate(rings):
        assert ring.shape == (4, 16, 1024)
        ring.fill_(number + 0.5)
    assert [ring.unique().tolist() for ring in rings] == [[0.5], [1.5], [2.5]]
    arena = pool.arenas["ring"]
    assert rings[0].untyped_storage().data_ptr() == arena.untyped_storage().data_ptr()


def test_allocators_leave_the_null_block_out():
    pool = CachePool.allocate(CFG, pages=3)
    allocators = pool.allocators()
    assert allocators["ring"].allocate(2) == [1, 2]
    with pytest.raises(OutOfPagesError, match="group 'ring': wanted 1 pages, 0 of 2 are free"):
        allocators["ring"].allocate(1)
    assert allocators["window"].allocate(3) == [0, 1, 2]
    assert allocators["c2"].name == "c2"


@pytest.mark.parametrize("dtype", DTYPES)
def test_buffers_describe_every_byte_of_every_cache(dtype):
    pool = CachePool.allocate(CFG, pages=3, kv_cache_dtype=dtype, layer_ids=SOME_LAYERS)
    buffers = {info.name: info for info in pool.buffers()}
    assert len(buffers) == len(SOME_LAYERS) + 2 * 3 + 2
    for group, member, cache in caches_of(pool):
        info = buffers[member.name]
        assert info.group == group.name
        assert info.pages.data_ptr() == cache.pages.data_ptr()
        assert (
            info.shape == tuple(info.pages.shape) == (3, cache.page_rows * cache.record.row_bytes)
        )
        assert info.stride == tuple(info.pages.stride()) == (group.block_bytes, 1)
        assert info.bytes == info.shape[1]
        arena = pool.arenas[group.name]
        assert arena.data_ptr() + info.offset == info.pages.data_ptr()
    assert buffers["layers.2.ring"].bytes == 8 * 1024 * 4
    assert "tensor" not in repr(buffers["layers.2.ring"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_request_moves_to_another_pool_by_its_buffers(dtype):
    options = {"kv_cache_dtype": dtype, "layer_ids": SOME_LAYERS}
    source = CachePool.allocate(CFG, pages=9, **options)
    target = CachePool.allocate(CFG, pages={"window": 12, "c1": 5, "c2": 7, "ring": 3}, **options)
    old = {"window": [7, 0, 3], "c1": [4, 8], "c2": [1, 5], "ring": [6]}
    new = {"window": [2, 11, 5], "c1": [0, 3], "c2": [6, 2], "ring": [1]}
    rows = {}
    for number, (_, member, cache) in enumerate(caches_of(source)):
        generator = torch.Generator().manual_seed(number)
        values = torch.randn(cache.num_slots, cache.record.dim, generator=generator)
        scatter_rows(cache, torch.arange(cache.num_slots), values)
        rows[member.name] = values
    for layer_id in (2, 14):
        source.ring(layer_id).copy_(torch.randn(9, 8, 1024))
    for arena in target.arenas.values():
        arena.fill_(0xFF)
    by_name = {info.name: info for info in target.buffers()}
    for info in source.buffers():
        by_name[info.name].pages[new[info.group]] = info.pages[old[info.group]]
    for group, member, cache in caches_of(target):
        page_rows = group.page_rows
        slots = {
            key: torch.tensor(
                [b * page_rows + row for b in blocks[group.name] for row in range(page_rows)]
            )
            for key, blocks in (("old", old), ("new", new))
        }
        wanted = decode_rows(
            cache.record, *encode_rows(cache.record, rows[member.name][slots["old"]])
        )
        assert torch.equal(gather_rows(cache, slots["new"]), wanted), member.name
        untouched = sorted(set(range(group.num_blocks)) - set(new[group.name]))
        assert cache.pages[untouched].eq(0xFF).all()
    for layer_id in (2, 14):
        assert torch.equal(target.ring(layer_id)[1], source.ring(layer_id)[6])


def test_caches_of_one_group_do_not_disturb_each_other():
    pool = CachePool.allocate(CFG, pages=2, layer_ids=(2, 8))
    caches = [
        pool.compressed_cache(2),
        pool.index_cache(2),
        pool.compressed_cache(8),
        pool.index_cache(8),
    ]
    slots = torch.arange(caches[0].num_slots)
    values = [torch.randn(len(slots), cache.record.dim) for cache in caches]
    for cache, rows in zip(caches, values, strict=True):
        scatter_rows(cache, slots, rows)
    for cache, rows in zip(caches, values, strict=True):
        wanted = decode_rows(cache.record, *encode_rows(cache.record, rows))
        assert torch.equal(gather_rows(cache, slots), wanted)


# ---------------------------------------------------------------------------------------------- refusals


def test_bad_sizes_are_refused():
    with pytest.raises(ArgumentError, match="block_size: got 33; allowed: a multiple of 2"):
        CachePool.allocate(CFG, pages=1, block_size=33)
    with pytest.raises(ArgumentError, match="block_size: got 0; allowed: an integer >= 1"):
        CachePool.allocate(CFG, pages=1, block_size=0)
    with pytest.raises(ArgumentError, match="window_page_rows: got 0"):
        CachePool.allocate(CFG, pages=1, window_page_rows=0)
    with pytest.raises(ArgumentError, match=r"pages\['window'\]: got 0; allowed: an integer >= 1"):
        CachePool.allocate(CFG, pages=0)
    with pytest.raises(ArgumentError, match="num_spec_tokens: got -1"):
        CachePool.allocate(CFG, pages=1, num_spec_tokens=-1)
    assert (
        CachePool.allocate(CFG, pages=1, block_size=33, layer_ids=[20]).groups["c1"].page_rows == 33
    )


def test_groups_must_be_named_exactly():
    with pytest.raises(
        ArgumentError,
        match=r"pages: got groups \['c1', 'window'\]; allowed: one number for each of \['window'\]",
    ):
        CachePool.allocate(CFG, pages={"window": 1, "c1": 1}, layer_ids=[0])
    with pytest.raises(
        ArgumentError, match=r"one number for each of \['c1', 'c2', 'ring', 'window'\]"
    ):
        CachePool.allocate(CFG, pages={"window": 1})


def test_a_refused_dtype_allocates_nothing():
    with pytest.raises(ArgumentError, match="kv_cache_dtype: got 'bfloat16'"):
        CachePool.allocate(CFG, pages=1, kv_cache_dtype="bfloat16")


def test_missing_sources_are_refused():
    with pytest.raises(ArgumentError, match=r"layer_ids: got \[3\]; .*sources \[2\]; add them"):
        CachePool.allocate(CFG, pages=1, layer_ids=[3])


def test_caches_that_are_not_there_are_refused():
    pool = CachePool.allocate(CFG, pages=1, layer_ids=(0, 2, 20))
    with pytest.raises(
        ArgumentError, match=r"layer 5 \(window cache of layer 5\); allowed: layers \[0, 2, 20\]"
    ):
        pool.window_cache(5)
    with pytest.raises(
        ArgumentError, match=r"layer 9 \(compressed cache of layer 8\); allowed: layers \[2, 20\]"
    ):
        pool.compressed_cache(9)
    with pytest.raises(ArgumentError, match="layer_id: got 0; allowed: a layer of ratio 1 or 2"):
        pool.index_cache(0)
    with pytest.raises(
        ArgumentError, match=r"layer_id: got 20; allowed: layers with a ring: \[2\]"
    ):
        pool.ring(20)
    with pytest.raises(IndexRangeError, match=r"layer_id: got 43; allowed: 0\.\.42"):
        pool.compressed_cache(43)
