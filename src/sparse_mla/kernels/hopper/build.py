"""Compiles the CUDA sources with NVRTC, once for each variant, and keeps the binaries on disk."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparse_mla.cache.records import MXFP8, MXFP8_PLANAR, NVFP4, NVFP4_PLANAR, V4, RecordFormat
from sparse_mla.errors import UnsupportedError
from sparse_mla.kernels.hopper.bodies import BODIES, HEADS_OF_A_TILE, MANY_HEADS, SHARED_BYTES, Body
from sparse_mla.settings import settings

ARCHITECTURE = "sm_90a"
ENTRY = b"attend"
ZEROS = b"zero_row"
QUERY_BLOCK, BOX_BLOCKS = 64, 4
"""Dims of a block of the query; blocks of a box, which are half of it."""

_KINDS = {MXFP8: 0, MXFP8_PLANAR: 0, NVFP4: 1, NVFP4_PLANAR: 1, V4: 2}
RECORDS = tuple(_KINDS)
"""Records that the kernel reads."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What the source is specialised for; every size of a call stays a run-time value."""

    window: RecordFormat
    compressed: RecordFormat
    splits: int  # CTAs of a cluster that share one row: 1 to 8
    fp8_output: bool
    out_chunked: bool  # chunk-interleaved output
    with_max: bool  # keeps the true maximum for `max_logits`
    head_tiles: int = 8  # tiles of 8 heads of a block
    with_lse: bool = False  # many heads: keeps sums of the weights before they are rounded
    bf16_numbers: bool = False  # many heads: operands of the products are bf16 instead of f16

    @property
    def body(self) -> Body:
        """The source it is compiled from."""
        return BODIES[self.head_tiles * HEADS_OF_A_TILE]

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return self.body.threads_of(self.head_tiles)

    def macros(self) -> dict[str, int]:
        """Macros of the source, see its head."""
        sets = {"A": self.window, "B": self.compressed}
        values = {"SPLITS": self.splits, "FP8_OUTPUT": self.fp8_output, "WITH_MAX": self.with_max}
        values |= {"OUT_CHUNKED": self.out_chunked, "HEAD_TILES": self.head_tiles}
        if self.body is MANY_HEADS:
            values["WITH_LSE"] = self.with_lse
            values["BF16_NUMBERS"] = self.bf16_numbers
        for letter, record in sets.items():
            values[f"{letter}_KIND"] = _KINDS[record]
            values[f"{letter}_ROW_UNITS"] = record.data_stride // 16
            values[f"{letter}_SCALE_STRIDE"] = record.scale_stride
        return {name: int(value) for name, value in values.items()}


def source() -> str:
    """The translation unit of many heads, headers inlined."""
    return MANY_HEADS.source()


def binary(variant: Variant) -> bytes:
    """The cubin of a variant, from the cache folder if it is there."""
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    options = [f"--gpu-architecture={ARCHITECTURE}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in sorted(variant.macros().items())]
    text = variant.body.source()
    key = hashlib.sha256(f"{major}.{minor} {options} {text}".encode()).hexdigest()
    path = settings().cache_dir / f"hopper_attend_{key[:32]}.cubin"
    if path.is_file():
        return path.read_bytes()
    code = compile_source(text, options)
    _store(path, code)
    return code


def compile_source(text: str, options: list[str]) -> bytes:
    """Compile with NVRTC to a cubin.

    Raises:
        UnsupportedError: NVRTC refused; the message holds its log.
    """
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"attend.cu", 0, [], [])
    encoded = [option.encode() for option in options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise UnsupportedError("compiling the Hopper kernel", [log.decode(errors="replace")])
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    code = b" " * size
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(code)


@functools.lru_cache(maxsize=1024)
def query_map(
    address: int,
    shape: tuple[int, int, int],
    strides: tuple[int, int, int],
    chunked: bool,
    block: int,
) -> Any:
    """How a bf16 query lies in device memory, as the TMA takes it: a CUtensorMap.

    A box of it is four blocks of heads x 64 dims of one token, in the order of shared memory: dims, pieces of dims, heads, blocks.

    Args:
        address: of the query, a multiple of 16.
        shape: tokens, heads, 512.
        strides: elements.
        chunked: pieces of 16 dims of all heads lie together, not all dims of a head.
        block: heads of a box.
    """
    from cuda.bindings import driver

    tokens, heads, dims = shape
    piece = 16 if chunked else QUERY_BLOCK
    pieces = QUERY_BLOCK // piece
    between = (
        [piece * heads, piece, pieces * piece * heads, strides[0]]
        if chunked
        else [piece, strides[1], piece, strides[0]]
    )
    return _checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            5,
            address,
            [
                driver.cuuint64_t(size)
                for size in (piece, pieces, heads, dims // QUERY_BLOCK, tokens)
            ],
            [driver.cuuint64_t(2 * stride) for stride in between],
            [driver.cuuint32_t(size) for size in (piece, pieces, block, BOX_BLOCKS, 1)],
            [driver.cuuint32_t(1)] * 5,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


@functools.cache
def function(variant: Variant, device_index: int) -> tuple[int, int]:
    """The loaded kernel on one device, as an address that a launch takes, and that of its zero bytes."""
    from cuda.bindings import driver

    with torch.cuda.device(device_index):
        torch.cuda.current_stream().synchronize()  # makes the context current; first use only
        module = _checked(driver.cuModuleLoadData(binary(variant)))
        kernel = _checked(driver.cuModuleGetFunction(module, ENTRY))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(kernel, attribute, SHARED_BYTES))
        zeros = _checked(driver.cuModuleGetGlobal(module, ZEROS))
    return int(kernel), int(zeros)


def launch(kernel: int, variant: Variant, arguments: int, ctas: int, stream: int) -> None:
    """Launch on a stream. `arguments`: address of the array of parameter addresses."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = ctas, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = variant.threads, 1, 1
    config.sharedMemBytes = SHARED_BYTES
    config.hStream = stream
    attributes = _attributes(variant.splits, settings().overlap)
    config.attrs = list(attributes)
    config.numAttrs = len(attributes)
    _checked(driver.cuLaunchKernelEx(config, driver.CUfunction(kernel), arguments, 0))


@functools.cache
def _attributes(splits: int, overlapped: bool) -> tuple[Any, ...]:
    """Attributes of a launch: the CTAs of a cluster, and whether it may begin before the launch ahead of it ends."""
    from cuda.bindings import driver

    names = driver.CUlaunchAttributeID
    attributes = []
    if splits > 1:
        cluster = driver.CUlaunchAttribute()
        cluster.id = names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x = splits
        cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1
        attributes.append(cluster)
    if overlapped:
        overlap = driver.CUlaunchAttribute()
        overlap.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        attributes.append(overlap)
    return tuple(attributes)


def _checked(result: tuple[Any, ...]) -> Any:
    """The value of a (status, value?) pair of cuda-bindings, or an error that names the status."""
    status = result[0]
    if int(status) != 0:
        raise RuntimeError(f"CUDA driver: {status!r}")
    return result[1] if len(result) > 1 else None


def _store(path: Path, code: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(code)
    Path(name).replace(path)
