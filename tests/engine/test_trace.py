"""Request lists: both forms, and a line number with a reason for everything that is wrong."""

import itertools
from pathlib import Path

import pytest

from sparse_mla.engine.make_requests import make_requests
from sparse_mla.engine.trace import TraceRequest, default_trace, parse_trace, read_trace
from sparse_mla.errors import TraceError

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
TIMED = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
PLAIN = "prompt_tokens,output_tokens\n"


def test_timed_form_gives_lengths_arrivals_and_lines() -> None:
    text = TIMED + "2023-11-16 18:17:03.9799600,374,44\n\n2023-11-16 18:17:05,91,1\n"
    first, second = parse_trace(text, "t.csv")
    assert first == TraceRequest(374, 44, 0.0, 2)
    assert (second.prompt_tokens, second.generated_tokens, second.line) == (91, 1, 4)
    assert second.arrival_s == pytest.approx(1.02004, abs=1e-6)


@pytest.mark.parametrize(
    "header", [PLAIN, "prompt,output\n", "ContextTokens,GeneratedTokens\n", " Prompt , Output \n"]
)
def test_plain_form_keeps_the_order_of_the_file(header: str) -> None:
    assert parse_trace(header + "5,2\n3,1\n", "t") == [
        TraceRequest(5, 2, 0.0, 2),
        TraceRequest(3, 1, 0.0, 3),
    ]


def test_rows_leave_out_the_last_generated_token() -> None:
    assert TraceRequest(10, 1, 0.0, 2).rows == 10
    assert TraceRequest(10, 7, 0.0, 2).rows == 16


def test_requests_are_sorted_by_arrival_and_limited() -> None:
    text = TIMED + "2023-01-01 00:00:09,9,1\n2023-01-01 00:00:01,1,1\n2023-01-01 00:00:05,5,1\n"
    assert [request.prompt_tokens for request in parse_trace(text, "t", limit=2)] == [1, 5]


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_bytes(b"\xef\xbb\xbf" + (PLAIN + "5,2\n").replace("\n", "\r\n").encode())
    assert read_trace(file) == [TraceRequest(5, 2, 0.0, 2)]


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", 1, "unknown header ''"),
        ("a,b\n1,2\n", 1, "unknown header 'a,b'"),
        ("5,2\n", 1, "unknown header '5,2'"),
        (TIMED, 1, "no request below the header"),
        (PLAIN + "\n\n", 1, "no request below the header"),
        (PLAIN + "1,2\n1\n", 3, "1 columns, wanted 2"),
        (PLAIN + "1,2,3\n", 2, "3 columns, wanted 2"),
        (TIMED + "5,2\n", 2, "2 columns, wanted 3"),
        (PLAIN + "1,2\n\n0,2\n", 4, "prompt_tokens is '0'"),
        (PLAIN + "1,0\n", 2, "output_tokens is '0'"),
        (PLAIN + "-1,2\n", 2, "prompt_tokens is '-1'"),
        (PLAIN + "1.5,2\n", 2, "prompt_tokens is '1.5'"),
        (PLAIN + "x,2\n", 2, "prompt_tokens is 'x'"),
        (PLAIN + ",2\n", 2, "prompt_tokens is ''"),
        (PLAIN + "nan,2\n", 2, "prompt_tokens is 'nan'"),
        (PLAIN + "\u0663,2\n", 2, "prompt_tokens is"),
        (PLAIN + "99999999999999999999999,2\n", 2, "whole number of tokens"),
        (PLAIN + "2147483648,2\n", 2, "whole number of tokens"),
        (TIMED + "yesterday,1,2\n", 2, "TIMESTAMP is 'yesterday'"),
        (TIMED + "2023-11-16 18:17:03.9x,1,2\n", 2, "TIMESTAMP is"),
        (TIMED + "2023-13-16 18:17:03,1,2\n", 2, "TIMESTAMP is"),
        (PLAIN + '1,"2\n', 2, "not CSV"),
    ],
)
def test_a_bad_line_is_named_with_its_reason(text: str, line: int, reason: str) -> None:
    with pytest.raises(TraceError, match=r"t\.csv:") as caught:
        parse_trace(text, "t.csv")
    assert caught.value.line == line
    assert reason in caught.value.reason


def test_a_bad_line_counts_even_past_the_limit() -> None:
    with pytest.raises(TraceError, match=":4: output_tokens is '-2'"):
        parse_trace(PLAIN + "1,1\n2,2\n3,-2\n", "t.csv", limit=1)


def test_a_request_longer_than_the_model_is_named() -> None:
    with pytest.raises(TraceError, match=":3: 101 tokens, but the model takes 100"):
        parse_trace(PLAIN + "100,1\n100,2\n", "t.csv", max_rows=100)
    assert len(parse_trace(PLAIN + "100,1\n100,2\n", "t.csv", max_rows=100, limit=1)) == 1


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.csv:0: No such file"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(TraceError, match=":0: Is a directory"):
        read_trace(tmp_path)
    binary = tmp_path / "binary.csv"
    binary.write_bytes(PLAIN.encode() + b"1,2\n\xff\xfe,3\n")
    with pytest.raises(TraceError, match=":3: not UTF-8 text"):
        read_trace(binary)


def test_own_list_is_what_its_generator_writes() -> None:
    text = make_requests()
    assert default_trace() == parse_trace(text, "generated")
    lengths = [request.prompt_tokens for request in default_trace()]
    assert len(lengths) == 64
    assert max(lengths[:8]) > 512, "the first eight must exceed what a query may attend"
    assert make_requests(seed=1) != text


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real traces in ../shared/data are not there")
@pytest.mark.parametrize(
    ("name", "requests", "longest", "first"),
    [
        ("azure_llm_conv_2023.csv", 19366, 14050, (374, 44)),
        ("azure_llm_code_2023.csv", 8819, 7437, (4808, 10)),
    ],
)
def test_real_traces(name: str, requests: int, longest: int, first: tuple[int, int]) -> None:
    trace = read_trace(SHARED / name)
    assert len(trace) == requests
    assert max(request.prompt_tokens for request in trace) == longest
    assert (trace[0].prompt_tokens, trace[0].generated_tokens) == first
    assert all(a.arrival_s <= b.arrival_s for a, b in itertools.pairwise(trace))
