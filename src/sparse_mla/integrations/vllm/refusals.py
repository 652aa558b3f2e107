"""What an engine asks for, and every reason why our layer cannot give it. No vLLM needed."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_mla.cache.kv_dtype import resolve_kv_cache_dtype
from sparse_mla.errors import ArgumentError
from sparse_mla.integrations.vllm.names import BACKENDS, MEGA, TESTED_VERSIONS, is_tested
from sparse_mla.kernels.contract import HEAD_DIM, MAX_HEADS, ROPE_DIM

CAPABILITY_MAJOR = 9
"""Hopper. Elsewhere vLLM keeps `wo_a` in FP8 and pages of 128 tokens, for its own fused kernels."""
KERNEL_BLOCK_TOKENS = 64
"""vLLM's V4.1 indexer takes no other block on Hopper, and packed blocks cannot be split; ours take any."""
KV_DTYPES = {MEGA: ("auto", "fp8_ds_mla", "fp8", "nvfp4_ds_mla")}
DEFAULT_KV_DTYPE = {MEGA: "nvfp4_ds_mla"}
_PLAIN_KV_DTYPES = ("auto", "fp8_ds_mla", "fp8")
_PLAIN_DEFAULT = "fp8_ds_mla"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The parts of an engine's configuration that our layer depends on."""

    backend: str
    vllm_version: str
    capability: tuple[int, int] | None  # compute capability of the GPU; None = no NVIDIA GPU
    kv_cache_dtype: str
    num_heads: int  # of the model
    num_groups: int  # output groups of the model
    head_dim: int = HEAD_DIM
    rope_dim: int = ROPE_DIM
    tensor_parallel: int = 1
    prefill_context_parallel: int = 1
    decode_context_parallel: int = 1
    block_tokens: int | None = None  # that the user asked for


def kv_dtypes(backend: str) -> tuple[str, ...]:
    """KV cache dtypes that a backend of ours reads."""
    return KV_DTYPES.get(backend, _PLAIN_KV_DTYPES)


def default_kv_dtype(backend: str) -> str:
    """What `auto` means to a backend of ours."""
    return DEFAULT_KV_DTYPE.get(backend, _PLAIN_DEFAULT)


def explicit_kv_dtype(name: str) -> str:
    """The canonical name of a KV cache dtype that a user asked for; `auto` stays.

    vLLM itself would read `fp8` as "whatever the backend prefers", which need not be FP8.
    """
    return _PLAIN_DEFAULT if name == "fp8" else name


def refusals(wanted: Wanted) -> list[str]:
    """Every reason why the layer cannot be built, one sentence each; empty = it can."""
    reasons = []
    if not is_tested(wanted.vllm_version):
        reasons.append(
            f"vLLM version: got {wanted.vllm_version}; tested: {', '.join(TESTED_VERSIONS)}; "
            "install a tested one"
        )
    if wanted.backend not in BACKENDS:
        reasons.append(f"backend: got {wanted.backend}; allowed: {', '.join(BACKENDS)}")
    reasons += _device(wanted.capability)
    reasons += _kv_dtype(wanted)
    if wanted.block_tokens not in (None, KERNEL_BLOCK_TOKENS):
        reasons.append(
            f"block size: got {wanted.block_tokens} tokens; allowed: {KERNEL_BLOCK_TOKENS}; "
            "leave --block-size out"
        )
    for name, got, remedy in (
        ("prefill context parallelism", wanted.prefill_context_parallel, "use tensor parallelism"),
        ("decode context parallelism", wanted.decode_context_parallel, "use tensor parallelism"),
    ):
        if got > 1:
            reasons.append(f"{name}: got {got} ranks; allowed: 1; {remedy}")
    return [*reasons, *_heads(wanted)]


def _device(capability: tuple[int, int] | None) -> list[str]:
    if capability is not None and capability[0] == CAPABILITY_MAJOR:
        return []
    got = (
        "no NVIDIA GPU"
        if capability is None
        else f"compute capability {capability[0]}.{capability[1]}"
    )
    reason = (
        f"device: got {got}; allowed: Hopper ({CAPABILITY_MAJOR}.x); on other GPUs leave "
        "--attention-backend out and vLLM takes its own kernels"
    )
    return [reason]


def _kv_dtype(wanted: Wanted) -> list[str]:
    supported = kv_dtypes(wanted.backend)
    try:
        resolve_kv_cache_dtype(wanted.kv_cache_dtype, backend=wanted.backend, supported=supported)
    except ArgumentError as error:
        return [str(error)]
    if wanted.kv_cache_dtype not in supported:  # one of the library's names that vLLM does not have
        return [f"kv_cache_dtype: got {wanted.kv_cache_dtype!r}; allowed: {', '.join(supported)}"]
    return []


def _heads(wanted: Wanted) -> list[str]:
    reasons = []
    if (wanted.head_dim, wanted.rope_dim) != (HEAD_DIM, ROPE_DIM):
        reasons.append(
            f"head size: got {wanted.head_dim} with {wanted.rope_dim} rotary; "
            f"allowed: {HEAD_DIM} with {ROPE_DIM}"
        )
    ranks = wanted.tensor_parallel
    for name, count in (
        ("attention heads", wanted.num_heads),
        ("output groups", wanted.num_groups),
    ):
        if count % ranks or count < ranks:
            reasons.append(
                f"{name}: got {count} on {ranks} tensor-parallel ranks; allowed: a multiple of the "
                "ranks, so that no group spans two of them"
            )
    if wanted.num_groups and wanted.num_heads % wanted.num_groups:
        reasons.append(
            f"attention heads: got {wanted.num_heads}; allowed: a multiple of {wanted.num_groups} groups"
        )
    if wanted.num_heads // ranks > MAX_HEADS:
        reasons.append(
            f"attention heads of a rank: got {wanted.num_heads // ranks}; allowed: 1 to {MAX_HEADS}; "
            "use more tensor-parallel ranks"
        )
    return reasons
