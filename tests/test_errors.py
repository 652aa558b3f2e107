"""The exception tree, its messages, the argument checks and the settings."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from sparse_mla import errors
from sparse_mla._checks import check_at_least, check_choice, check_tensor
from sparse_mla.errors import (
    ArgumentError,
    CacheFormatError,
    ConfigError,
    DeviceError,
    DTypeError,
    IndexRangeError,
    OutOfPagesError,
    PlanMismatchError,
    ShapeError,
    SparseMLAError,
    StrideError,
    TraceError,
    UnsupportedError,
)
from sparse_mla.settings import Settings

TREE = {
    ConfigError: ValueError,
    ArgumentError: ValueError,
    ShapeError: ArgumentError,
    DTypeError: TypeError,
    DeviceError: ArgumentError,
    StrideError: ArgumentError,
    IndexRangeError: IndexError,
    CacheFormatError: ArgumentError,
    TraceError: ValueError,
    OutOfPagesError: RuntimeError,
    PlanMismatchError: RuntimeError,
    UnsupportedError: NotImplementedError,
}


def test_the_tree_is_complete_and_drawn_in_the_module() -> None:
    classes = {
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, SparseMLAError)
    }
    assert classes == {SparseMLAError, *TREE}
    for error, base in TREE.items():
        assert issubclass(error, base)
        assert issubclass(error, SparseMLAError)
        assert error.__doc__
        assert error.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize(
    "error",
    [
        ArgumentError,
        ShapeError,
        DTypeError,
        DeviceError,
        StrideError,
        IndexRangeError,
        CacheFormatError,
    ],
)
def test_argument_errors_answer_four_questions(error: type[ArgumentError]) -> None:
    caught = error("slots", 7, "0..5", "take fewer")
    assert str(caught) == "slots: got 7; allowed: 0..5; take fewer"
    assert str(error("slots", 7, "0..5")) == "slots: got 7; allowed: 0..5"
    assert (caught.argument, caught.got) == ("slots", 7)


def test_config_error_names_the_field() -> None:
    with pytest.raises(ConfigError, match="^config field 'head_dim': got 1; allowed: 512; why$"):
        raise ConfigError("head_dim", 1, "512", "why")


def test_trace_error_gives_file_and_line() -> None:
    caught = TraceError("a.csv", 3, "no number")
    assert str(caught) == "a.csv:3: no number"
    assert (caught.path, caught.line, caught.reason) == ("a.csv", 3, "no number")


def test_unsupported_lists_every_reason() -> None:
    caught = UnsupportedError("attend", ["torch: no", "triton: never"])
    assert caught.reasons == ("torch: no", "triton: never")
    assert str(caught) == "attend is not supported here:\n  - torch: no\n  - triton: never"


FLOATS = (torch.float32, torch.bfloat16)


def test_check_tensor_accepts_letters_for_any_size() -> None:
    check_tensor(
        "x", torch.zeros(3, 64), shape=["T", 64], dtypes=FLOATS, device=torch.device("cpu")
    )
    check_tensor("x", torch.zeros(0, 64), shape=["T", 64], dtypes=FLOATS)
    check_tensor("x", torch.zeros(()), shape=[], dtypes=FLOATS)


@pytest.mark.parametrize(
    ("tensor", "error", "words"),
    [
        (torch.zeros(64), ShapeError, r"x: got shape \[64\]; allowed: shape \[T, 64\]"),
        (torch.zeros(2, 65), ShapeError, r"x: got shape \[2, 65\]; allowed: shape \[T, 64\]"),
        (
            torch.zeros(2, 64).int(),
            DTypeError,
            "got dtype int32; allowed: dtype float32 or bfloat16",
        ),
        (torch.zeros(64, 64).t(), StrideError, r"got last stride 64; .*call \.contiguous\(\)"),
        (torch.zeros(2, 64, device="meta"), DeviceError, "got device meta; allowed: device cpu"),
        ([1.0], ArgumentError, r"got list; allowed: a torch\.Tensor"),
    ],
)
def test_check_tensor_refuses(tensor: torch.Tensor, error: type[ArgumentError], words: str) -> None:
    with pytest.raises(error, match=words):
        check_tensor("x", tensor, shape=["T", 64], dtypes=FLOATS, device=torch.device("cpu"))


def test_choices_and_bounds() -> None:
    check_choice("kind", "a", ("a", "b"))
    check_at_least("n", 1, 1)
    with pytest.raises(ArgumentError, match="kind: got 'c'; allowed: 'a', 'b'"):
        check_choice("kind", "c", ("a", "b"))
    with pytest.raises(ArgumentError, match="n: got 0; allowed: an integer >= 1"):
        check_at_least("n", 0, 1)


def test_settings_have_defaults_and_are_typed() -> None:
    empty = Settings.from_environment({})
    assert (empty.backend, empty.triton_interpreter) == ("auto", False)
    assert empty.hopper_numbers == "f16"
    assert empty.overlap
    assert not Settings.from_environment({"SPARSE_MLA_OVERLAP": "Off"}).overlap
    assert Settings.from_environment({"SPARSE_MLA_HOPPER_NUMBERS": "BF16"}).hopper_numbers == "bf16"
    assert empty.cache_dir == Path("~/.cache/sparse_mla").expanduser()
    given = Settings.from_environment(
        {"SPARSE_MLA_BACKEND": " Torch ", "SPARSE_MLA_CACHE_DIR": "/k", "TRITON_INTERPRET": "1"}
    )
    assert given == Settings("torch", Path("/k"), True)
    with pytest.raises(
        ArgumentError, match="SPARSE_MLA_BACKEND: got 'cutlass'; allowed: auto, hop"
    ):
        Settings.from_environment({"SPARSE_MLA_BACKEND": "cutlass"})
    with pytest.raises(ArgumentError, match="SPARSE_MLA_OVERLAP: got '1'; allowed: on, off"):
        Settings.from_environment({"SPARSE_MLA_OVERLAP": "1"})
    with pytest.raises(ArgumentError, match="HOPPER_NUMBERS: got 'fp8'; allowed: f16, bf16"):
        Settings.from_environment({"SPARSE_MLA_HOPPER_NUMBERS": "fp8"})
