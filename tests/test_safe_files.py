"""What is read of a stranger's file: bounded in bytes, values, depth and length of lines."""

from pathlib import Path

import pytest

from threefold import safe_files
from threefold.safe_files import (
    MAX_JSON_DEPTH,
    MAX_LINE_BYTES,
    UnsafeFileError,
    parse_json,
    read_bounded,
    read_lines,
)


def test_json_is_bounded_in_depth_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    deepest = b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH
    assert parse_json(deepest)
    for nested in (b"[" + deepest + b"]", b'{"a":' * 101 + b"1" + b"}" * 101, b"[" * 10**5):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(nested)
    monkeypatch.setattr(safe_files, "MAX_JSON_VALUES", 10)
    assert parse_json("[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]") == list(range(1, 11))
    for many in ("[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]", "[{}, {}, {}, {}, {}, {}]", '{"a": [[[[[[[[[[]]]]]]]]]]}'):
        with pytest.raises(ValueError, match="more than 10 values"):
            parse_json(many)
        with pytest.raises(ValueError, match="more than 10 values"):
            parse_json(many.encode())


def test_room_is_taken_for_what_a_file_has(tmp_path: Path) -> None:
    """Not for what it may have at most: that is more than there is."""
    (tmp_path / "small").write_bytes(b"abc")
    assert read_bounded(tmp_path / "small", 2**60) == b"abc"
    assert read_bounded(tmp_path / "small", 3) == b"abc"
    with pytest.raises(OSError, match="more than 2 bytes"):
        read_bounded(tmp_path / "small", 2)


@pytest.mark.parametrize("size", [MAX_LINE_BYTES - 1, MAX_LINE_BYTES, MAX_LINE_BYTES + 1, 3 * MAX_LINE_BYTES])
def test_lines_that_are_too_long_are_left_out(size: int, tmp_path: Path) -> None:
    path, long = tmp_path / "log", b"x" * size
    path.write_bytes(b"a\n" + long + b"\n\nb\r\n" + long)
    kept = [long] if size < MAX_LINE_BYTES else []
    assert list(read_lines(path)) == [b"a", *kept, b"", b"b", *kept]


@pytest.mark.parametrize("wide", ["\U0001f600".encode(), b"\\ud83d\\ude00"])
def test_large_json_has_narrow_characters(wide: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wide character makes four bytes of each in its text: 256 MiB took 2.3 GiB."""
    monkeypatch.setattr(safe_files, "MAX_JSON_BYTES", 100)
    assert parse_json(b'["' + wide + b"x" * 50 + b'"]') == ["\U0001f600" + "x" * 50]
    assert parse_json(b'["' + b"x" * 200 + b'"]') == ["x" * 200]
    with pytest.raises(ValueError, match="more than ASCII"):
        parse_json(b'["' + wide + b"x" * 200 + b'"]')


def test_a_log_of_many_gigabytes_is_refused_at_once(tmp_path: Path) -> None:
    """A sparse file takes no room on the disk, and minutes to read."""
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.truncate(2**36)
    with pytest.raises(UnsafeFileError, match="too many for a log"):
        next(read_lines(tmp_path / "metrics.jsonl"))
