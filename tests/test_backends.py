"""Declarations, refusals and the choice between backends, for machines that are not here."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from sparse_mla.backends import declarations
from sparse_mla.backends.declarations import (
    HOPPER,
    KERNEL_BACKENDS,
    REFERENCE,
    TORCH,
    TRITON,
    MegaAttentionBackend,
    SparseMLABackend,
)
from sparse_mla.backends.problem import KNOWN_MACHINES, OPS, DeviceInfo, Problem
from sparse_mla.backends.select import BackendChoice, _select, explain, load_kernel, select
from sparse_mla.cache.records import INDEX_RECORDS, KV_RECORDS
from sparse_mla.errors import ArgumentError, UnsupportedError
from sparse_mla.settings import settings

DECODE = Problem(
    num_tokens=8,
    num_heads=64,
    window_record="mxfp8",
    compressed_record="nvfp4",
    window_keys=128,
    compressed_keys=512,
    output="fp8",
)
GPUS = KNOWN_MACHINES[1:]
CPU = DeviceInfo.from_capability("cpu")


@pytest.fixture(autouse=True)
def _every_kernel_is_there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The choice must not depend on which kernels a branch already holds, nor on this shell."""
    monkeypatch.setattr(declarations, "_has_kernel", lambda *_: True)
    monkeypatch.delenv("SPARSE_MLA_BACKEND", raising=False)
    settings.cache_clear()
    _select.cache_clear()
    yield
    settings.cache_clear()
    _select.cache_clear()


def machine(capability: str) -> DeviceInfo:
    """A machine that is not here."""
    return DeviceInfo.from_capability(capability)


def test_known_machines() -> None:
    assert KNOWN_MACHINES == ("cpu", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0", "12.1")
    assert machine("sm90") == machine("9.0") == machine("90")
    assert machine("sm_120").capability == (12, 0)
    assert (machine("9.0").name, machine("9.0").num_sms) == ("H200", 132)
    assert machine("9.0").describe() == "H200 (SM90)"
    assert machine("7.5").describe() == "an SM75 GPU (SM75)"
    assert CPU.triton_available
    assert not DeviceInfo.from_capability("9.0", triton=False).triton_available


@pytest.mark.parametrize("text", ["", "hopper", "9.", ".0", "9", "sm", "9.0.1"])
def test_a_machine_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ArgumentError, match='capability: got .*allowed: "cpu", or a capability'):
        DeviceInfo.from_capability(text)


def test_detect_describes_this_machine() -> None:
    here = DeviceInfo.detect("cpu")
    assert (here.kind, here.capability, here.name) == ("cpu", None, "CPU")
    assert DeviceInfo.detect(torch.device("cpu")) is here
    assert DeviceInfo.detect("meta").kind == "meta"


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("heads", [1, 4, 8, 12, 48, 64, 128])
def test_auto_on_every_gpu(capability: str, heads: int) -> None:
    choice = select(replace(DECODE, num_heads=heads), machine(capability))
    if capability == "9.0":
        assert choice == BackendChoice("hopper", "tuned for SM90")
    else:
        assert choice.name == "triton"
        reason = f"compute capability: got {capability}; allowed: 9.0 only"
        assert choice.rejected == (("hopper", (reason,)),)


def test_auto_on_a_cpu_says_why_not_the_others() -> None:
    choice = select(DECODE, CPU)
    refused = ("device: got CPU; allowed: cuda",)
    assert (choice.name, choice.reason) == ("torch", "plain PyTorch, runs on every device")
    assert choice.rejected == (("hopper", refused), ("triton", refused))
    assert str(choice) == (
        "torch (plain PyTorch, runs on every device); not hopper: device: got CPU; allowed: cuda; "
        "not triton: device: got CPU; allowed: cuda"
    )


@pytest.mark.parametrize("capability", GPUS)
def test_without_triton_torch_runs_and_the_reason_is_kept(capability: str) -> None:
    bare = DeviceInfo.from_capability(capability, triton=False)
    choice = select(replace(DECODE, op="write_window"), bare)
    assert choice.name == "torch"
    assert dict(choice.rejected)["triton"] == (
        "library triton: not installed; install sparse-mla[gpu]",
    )


def test_hopper_needs_its_library_and_says_so() -> None:
    bare = replace(machine("9.0"), libraries=frozenset({"triton"}))
    choice = select(DECODE, bare)
    assert choice.name == "triton"
    assert choice.rejected == (
        ("hopper", ("library cuda.bindings: not installed; install sparse-mla[gpu]",)),
    )


def test_old_and_foreign_gpus_run_plain_pytorch() -> None:
    old = select(DECODE, machine("7.5"))
    assert old.name == "torch"
    assert dict(old.rejected)["triton"] == ("compute capability: got 7.5; allowed: 8.0 and up",)
    foreign = select(DECODE, DeviceInfo("hip", name="MI300X", libraries=frozenset({"triton"})))
    assert foreign.name == "torch"
    assert dict(foreign.rejected)["triton"] == ("device: got MI300X; allowed: cuda",)


@pytest.mark.parametrize("window", [record.name for record in KV_RECORDS])
@pytest.mark.parametrize("compressed", [None, *[record.name for record in KV_RECORDS]])
def test_every_record_pair_runs_on_hopper(window: str, compressed: str | None) -> None:
    problem = replace(DECODE, window_record=window, compressed_record=compressed)
    assert select(problem, machine("9.0")).name == "hopper"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_heads": 129}, "heads: got 129; allowed: 1 to 128"),
        ({"num_heads": 0}, "heads: got 0; allowed: 1 to 128"),
        ({"dtype": "float16"}, "dtype: got float16; allowed: bfloat16"),
        ({"window_record": "int8"}, "window record: got int8; allowed: v4, mxfp8, mxfp8_planar"),
        ({"compressed_record": "index_fp8"}, "compressed record: got index_fp8; allowed: v4"),
        ({"index_record": "mxfp8"}, "index record: got mxfp8; allowed: index_fp8, index_mxfp4"),
    ],
)
@pytest.mark.parametrize("capability", KNOWN_MACHINES)
def test_what_no_backend_takes(change: dict[str, object], words: str, capability: str) -> None:
    problem = replace(DECODE, **change)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="is not supported here") as caught:
        select(problem, machine(capability))
    for name in ("hopper", "triton", "torch"):
        assert any(reason.startswith(f"{name}: {words}") for reason in caught.value.reasons)
    assert problem.describe() in str(caught.value)


@pytest.mark.parametrize("capability", KNOWN_MACHINES)
@pytest.mark.parametrize("name", ["hopper", "triton", "torch", "reference"])
def test_a_request_is_honoured_or_refused_never_replaced(capability: str, name: str) -> None:
    fits = {
        "hopper": capability == "9.0",
        "triton": capability != "cpu",
        "torch": True,
        "reference": capability == "cpu",
    }[name]
    if fits:
        assert select(DECODE, machine(capability), name) == BackendChoice(name, "requested by name")
        return
    with pytest.raises(UnsupportedError, match=f"backend '{name}', requested by name") as caught:
        select(DECODE, machine(capability), name)
    reasons = {body.name: why for body, why in explain(DECODE, machine(capability))}
    assert caught.value.reasons == reasons[name] != ()


def test_all_reasons_are_collected() -> None:
    problem = replace(DECODE, num_heads=200, dtype="float32", op="compress")
    bare = DeviceInfo.from_capability("8.0", triton=False)
    assert HOPPER.refusals(problem, bare) == [
        "compute capability: got 8.0; allowed: 9.0 only",
        "op: got compress; hopper has attend",
        "dtype: got float32; allowed: bfloat16",
        "heads: got 200; allowed: 1 to 128",
    ]
    assert [body.name for body, _ in explain(problem, bare)] == [
        body.name for body in KERNEL_BACKENDS
    ]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match="backend: got 'cutlass'; allowed: 'auto', 'hopper'"):
        select(DECODE, CPU, "cutlass")
    with pytest.raises(ArgumentError, match="op: got 'attention'; allowed: 'attend'"):
        Problem(op="attention")
    with pytest.raises(ArgumentError, match="output: got 'fp4'; allowed: 'bf16', 'fp8'"):
        Problem(output="fp4")


def test_the_setting_counts_as_a_request_for_attention_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPARSE_MLA_BACKEND", "triton")
    settings.cache_clear()
    origin = "requested by SPARSE_MLA_BACKEND"
    assert select(DECODE, machine("9.0")) == BackendChoice("triton", origin)
    assert select(DECODE, machine("9.0"), "torch").name == "torch"
    assert select(replace(DECODE, op="compress"), CPU).name == "torch"
    with pytest.raises(UnsupportedError, match="backend 'triton', requested by SPARSE_MLA_BACKEND"):
        select(DECODE, CPU)


def test_a_kernel_that_is_not_there_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declarations, "_has_kernel", lambda name, _: name == "torch")
    choice = select(DECODE, machine("9.0"))
    assert choice.name == "torch"
    assert choice.rejected == (
        ("hopper", ("op: got attend; hopper has nothing yet",)),
        ("triton", ("op: got attend; triton has nothing yet",)),
    )


def test_the_interpreter_runs_triton_on_a_cpu_by_name_only() -> None:
    interpreted = replace(CPU, triton_interpreter=True)
    assert select(DECODE, interpreted).name == "torch"
    assert select(DECODE, interpreted, "triton").name == "triton"


@pytest.mark.parametrize("op", OPS)
def test_the_torch_and_reference_bodies_have_every_op(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    for backend in (TORCH, REFERENCE):
        assert backend.has_kernel(op)
        assert callable(load_kernel(backend.name, op))


def test_index_records_are_declared() -> None:
    for record in INDEX_RECORDS:
        problem = Problem(op="index_topk", num_heads=32, index_record=record.name)
        assert select(problem, CPU).name == "torch"
        assert select(problem, machine("10.0")).name == "triton"
    assert problem.describe() == "index_topk with 32 heads, index index_mxfp4"


BACKENDS = [SparseMLABackend, MegaAttentionBackend]


def test_declared_names_and_formats() -> None:
    assert SparseMLABackend.get_name() == "FLASHMLA_SPARSE_DSV41"
    assert MegaAttentionBackend.get_name() == "FLASHMLA_MEGA_ATTN_DSV41"
    assert SparseMLABackend.supported_kv_cache_dtypes == ["auto", "fp8_ds_mla", "fp8"]
    assert MegaAttentionBackend.supported_kv_cache_dtypes == [
        "auto", "fp8_ds_mla", "fp8", "nvfp4_ds_mla",
    ]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_declared_values(backend: type[SparseMLABackend]) -> None:
    assert backend.supported_dtypes == [torch.bfloat16]
    assert backend.get_supported_head_sizes() == [512]
    assert (backend.is_mla(), backend.is_sparse(), backend.supports_sink()) == (True, True, True)
    assert backend.get_supported_kernel_block_sizes((9, 0)) == [64]
    for capability in ((8, 0), (8, 9), (10, 0), (12, 1)):
        assert backend.get_supported_kernel_block_sizes(capability) == [128]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_builder_is_the_compressed_metadata_builder(backend: type[SparseMLABackend]) -> None:
    module = importlib.import_module("sparse_mla.metadata.compressed")
    assert backend.get_builder_cls() is module.SparseMLAMetadataBuilder


@pytest.mark.parametrize("backend", BACKENDS)
def test_there_is_no_impl_class(backend: type[SparseMLABackend]) -> None:
    with pytest.raises(NotImplementedError, match="no impl class exists"):
        backend.get_impl_cls()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("capability", "level", "runs"),
    [
        (None, "torch", None),
        ((7, 5), "refused", False),
        ((8, 0), "portable", True),
        ((8, 6), "portable", True),
        ((8, 9), "portable", True),
        ((9, 0), "tuned", True),
        ((10, 0), "portable", True),
        ((12, 0), "portable", True),
        ((12, 1), "portable", True),
    ],
)
def test_capability_says_tuned_portable_or_refused(
    backend: type[SparseMLABackend],
    capability: tuple[int, int] | None,
    level: str,
    runs: bool | None,
) -> None:
    answer = backend.capability(capability)
    assert answer.level == level
    assert ("allowed: 8.0 and up" in answer.reason) == (level == "refused")
    if capability is not None:
        assert backend.supports_compute_capability(capability) == runs


def combination(
    backend: type[SparseMLABackend],
    *,
    head_size: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    kv_cache_dtype: str | None = "auto",
    block_size: int | None = 256,
    use_mla: bool = True,
    use_sparse: bool = True,
    capability: tuple[int, int] | None = (9, 0),
) -> str | None:
    """Ask with everything that fits but what the test changes."""
    return backend.supports_combination(
        head_size, dtype, kv_cache_dtype, block_size, use_mla, True, use_sparse, capability
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("capability", [None, (8, 0), (9, 0), (10, 0), (12, 1)])
def test_combinations_that_fit(
    backend: type[SparseMLABackend], capability: tuple[int, int] | None
) -> None:
    for name in backend.supported_kv_cache_dtypes:
        assert combination(backend, kv_cache_dtype=name, capability=capability) is None
    assert combination(backend, kv_cache_dtype=None, block_size=None, capability=capability) is None


def test_block_sizes_are_multiples_of_the_kernels() -> None:
    assert combination(MegaAttentionBackend, block_size=64) is None
    for size, capability, allowed in ((96, (9, 0), 64), (0, (9, 0), 64), (64, (10, 0), 128)):
        words = f"block size: got {size}; allowed: multiples of {allowed}"
        assert combination(MegaAttentionBackend, block_size=size, capability=capability) == words


def test_combinations_that_are_refused() -> None:
    kv = "KV cache dtype: got nvfp4_ds_mla; allowed: auto, fp8_ds_mla, fp8"
    assert combination(SparseMLABackend, kv_cache_dtype="nvfp4_ds_mla") == kv
    refused = combination(MegaAttentionBackend, kv_cache_dtype="bfloat16")
    assert refused == "KV cache dtype: got bfloat16; allowed: auto, fp8_ds_mla, fp8, nvfp4_ds_mla"
    everything = combination(
        MegaAttentionBackend,
        head_size=576,
        dtype=torch.float16,
        use_mla=False,
        use_sparse=False,
        capability=(7, 0),
    )
    assert everything == (
        "head size: got 576; allowed: 512; dtype: got float16; allowed: bfloat16; "
        "MLA: got a model without it; allowed: MLA only; "
        "sparse: got dense attention; allowed: sparse only; "
        "compute capability: got 7.0; allowed: 8.0 and up"
    )


def test_declaring_names_no_backend_twice() -> None:
    names = [backend.name for backend in KERNEL_BACKENDS]
    assert names == ["hopper", "triton", "torch", "reference"]
    assert [backend.automatic for backend in KERNEL_BACKENDS] == [True, True, True, False]
    assert (HOPPER.capability, TRITON.min_capability) == ((9, 0), (8, 0))
