"""Malformed, truncated and hostile traces: one finding each, with the file and the reason, and never a traceback."""

import gzip
import json
import os
import random
import sqlite3
import zlib
from pathlib import Path

import pytest
from traces import GEMM, NCCL, NsightExport, annotation, copy, kernel, launch, memory_event, operator, write_trace

import threefold.profile.readers.json_events as json_events
import threefold.profile.readers.text_stream as text_stream
from threefold.findings import Finding, FindingsError
from threefold.profile.analyze import profile_traces


def refused(path: Path) -> Finding:
    """The one finding about a trace."""
    with pytest.raises(FindingsError) as caught:
        profile_traces([path])
    (finding,) = caught.value.findings
    assert finding.rule in ("trace-readable", "trace-has-work")
    assert str(path) in finding.at
    assert finding.advice
    return finding


K = json.dumps(kernel(GEMM, 0, 10))
BAD_TEXT = {
    "empty": b"",
    "blank": b"  \n ",
    "binary": bytes(range(256)) * 10,
    "nul": b"\0" * 1000,
    "html": b"<html><body>404</body></html>",
    "number": b"42",
    "text": b'"traceEvents"',
    "null": b"null",
    "no events": b'{"schemaVersion": 1}',
    "events are no list": b'{"traceEvents": {"a": 1}}',
    "events are numbers": b'{"traceEvents": [1, 2, 3]}',
    "events are lists": b'{"traceEvents": [[], []]}',
    "cut in an event": f'{{"traceEvents": [{K}, {K[:40]}'.encode(),
    "cut behind an event": f'{{"traceEvents": [{K}, {K}'.encode(),
    "cut behind a comma": f'{{"traceEvents": [{K}, '.encode(),
    "cut behind the events": f'{{"traceEvents": [{K}]'.encode(),
    "cut in the header": b'{"schemaVersion": 1, "deviceProperties": [{"id": 0, ',
    "cut in a string": f'{{"traceEvents": [{K}, {{"name": "abc'.encode(),
    "array without an end": f"[{K}, {K}".encode(),
    "no comma": f'{{"traceEvents": [{K} {K}]}}'.encode(),
    "comma at the end": f'{{"traceEvents": [{K},]}}'.encode(),
    "two traces": f'{{"traceEvents": [{K}]}} {{"traceEvents": []}}'.encode(),
    "many fields": b"{" + b",".join(b'"%d": 0' % n for n in range(1001)) + b', "traceEvents": []}',
    "field without a name": b'{1: 2, "traceEvents": []}',
    "fields without a comma": b'{"a": 1 "traceEvents": []}',
    "nan": f'{{"traceEvents": [{K.replace("10", "NaN")}]}}'.encode(),
    "infinity": f'{{"traceEvents": [{K.replace("10", "1e999")}]}}'.encode(),
    "huge number": f'{{"traceEvents": [{K.replace("10", "9" * 400)}]}}'.encode(),
    "huge time": f'{{"traceEvents": [{K.replace("10", "1e300")}]}}'.encode(),
    "negative length": f'{{"traceEvents": [{K.replace("10", "-10")}]}}'.encode(),
    "length as text": f'{{"traceEvents": [{K.replace("10", chr(34) + "10" + chr(34))}]}}'.encode(),
    "name as a number": f'{{"traceEvents": [{K.replace(json.dumps(GEMM), "7")}]}}'.encode(),
    "args as a list": b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 0, "dur": 1, "name": "k", "args": []}]}',
    "deep list": b'{"traceEvents": [' + b"[" * 100_000 + b"]" * 100_000 + b"]}",
    "deep args": b'{"traceEvents": [{"args": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}]}",
    "deep header": b'{"deviceProperties": ' + b"[" * 100_000 + b"]" * 100_000 + b', "traceEvents": []}',
    "not utf-8": b'{"traceEvents": [{"ph": "X", "name": "\xff\xfe", "cat": "kernel", "ts": 0, "dur": 1}]}',
    "no work": b'{"traceEvents": [{"ph": "M", "name": "process_name"}]}',
    "zip": b"PK\x03\x04" + b"\0" * 60,
    "gzip header alone": b"\x1f\x8b\x08\x00",
    "sqlite header alone": b"SQLite format 3\0",
}


@pytest.mark.parametrize("text", BAD_TEXT.values(), ids=BAD_TEXT)
def test_bad_text_gives_one_finding(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(text)
    refused(path)
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(text))
    refused(packed)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cut in an event", "truncated"),
        ("cut behind the events", "truncated"),
        ("binary", "no trace"),
        ("deep args", "nested too deeply"),
        ("nan", "malformed JSON"),
        ("negative length", "lasts -10"),
        ("no work", "neither a GPU kernel nor a CPU operator"),
        ("args as a list", "of a wrong kind"),
    ],
)
def test_the_reason_is_told(tmp_path: Path, name: str, words: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(BAD_TEXT[name])
    assert words in refused(path).problem


def test_files_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.json")
    (tmp_path / "loop.json").symlink_to("loop.json")
    (tmp_path / "empty").mkdir()
    for name in ("fifo.json", "loop.json", "missing.json", "empty"):
        refused(tmp_path / name)
    assert "device" in refused(Path("/dev/zero")).problem


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    path = tmp_path / "memory-0.pickle"
    path.write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.")
    assert "pickle" in refused(path).problem
    assert not Path("hacked").exists()


def test_truncated_gzip_at_every_place(tmp_path: Path) -> None:
    whole = gzip.compress(f'{{"traceEvents": [{K}, {K}]}}'.encode())
    path = tmp_path / "trace.json.gz"
    for size in range(1, len(whole), 7):
        path.write_bytes(whole[:size])
        refused(path)


def test_gzip_of_several_members_is_whole(tmp_path: Path) -> None:
    text = f'{{"traceEvents": [{K}, {K}]}}'.encode()
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(text[:50]) + gzip.compress(text[50:]) + b"\0" * 100)
    assert profile_traces([path]).top.num_events == 2


def test_a_bomb_is_noticed_while_it_unpacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sound events that compress a thousandfold: memory and time end at the limit, not at the bomb's size."""
    monkeypatch.setattr(text_stream, "MIN_BOMB_BYTES", 2**20)
    monkeypatch.setattr(text_stream, "PIECE_BYTES", 2**16)
    packer = zlib.compressobj(9, wbits=31)
    path = tmp_path / "trace.json.gz"
    with path.open("wb") as file:
        file.write(packer.compress(b'{"traceEvents": [{}'))
        for _ in range(30):
            file.write(packer.compress(b",{}" * 100_000))
        file.write(packer.compress(b"]}") + packer.flush())
    assert "no trace does that" in refused(path).problem


def test_an_event_without_an_end_of_megabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_events, "MAX_EVENT_BYTES", 2**16)
    monkeypatch.setattr(text_stream, "PIECE_BYTES", 2**14)
    path = tmp_path / "trace.json"
    for text in (b'[{"name": "' + b"a" * 2**18, b'{"x": "' + b"a" * 2**18, b"[" + b'{"a":[' * 2**16):
        path.write_bytes(text)
        assert "MiB" in refused(path).problem


def test_odd_arguments_of_sound_events_are_no_reason_to_refuse(tmp_path: Path) -> None:
    """Fields that only some events have are not trusted, and not required either."""
    odd = [None, "7", 7.5, -3, 2**70, [1], {"a": 1}, True, "text", 1e300]
    events = []
    for number, value in enumerate(odd):
        args = {"stream": value, "device": value, "correlation": value, "External id": value}
        args |= {"Process Group Ranks": value, "Group size": value, "Collective name": value, "Input Dims": value}
        events.append({**kernel(GEMM, 10 * number, 5), "args": args})
        events.append({**operator("aten::mm", 10 * number, 5, 1), "args": args, "tid": value, "pid": value})
        events.append({**launch(10 * number, 1, 1), "args": args})
        events.append({**memory_event(10 * number, 1, 1), "args": {**args, "Device Type": value}})
        events.append(kernel(NCCL, 10 * number, 5, operation=value, ranks="[0, 1]"))
    assert profile_traces([write_trace(tmp_path / "trace.json", events)]).top.num_events >= 1


def test_bad_headers_are_ignored(tmp_path: Path) -> None:
    headers = {"deviceProperties": [1, {"id": [2]}], "distributedInfo": {"rank": "x", "pg_config": '["'}}
    path = write_trace(tmp_path / "trace.json", [kernel(GEMM, 0, 10)], **headers)
    assert profile_traces([path]).top.rank is None


def damaged(draw: random.Random, text: bytes) -> bytes:
    """The text with some bytes changed, removed or repeated."""
    content = bytearray(text)
    for _ in range(draw.randrange(1, 6)):
        place, kind = draw.randrange(len(content) + 1), draw.randrange(4)
        if kind == 0:
            content[place : place + draw.randrange(20)] = b""
        elif kind == 1:
            content[place:place] = bytes(draw.randrange(256) for _ in range(draw.randrange(4)))
        elif kind == 2:
            content[place:place] = draw.choice([b"{", b"}", b"[", b"]", b'"', b",", b"1e99", b"-", b"null", b"\\"])
        else:
            content[place:place] = content[draw.randrange(len(content) + 1) :][: draw.randrange(200)]
    return bytes(content)


def sound_trace() -> bytes:
    events = [
        operator("aten::mm", 0, 10, 1, **{"Input Dims": [[8, 8], [8, 8]], "Input type": ["float", "float"]}),
        launch(2, 3, 5),
        kernel(GEMM, 20, 10, correlation=5, external=1),
        kernel(NCCL, 25, 20, stream=20, operation="allreduce", group="1", ranks="[0, 1]"),
        copy(50, 5),
        annotation("threefold.step", 0, 60),
        memory_event(30, 1000, 2000),
        {**kernel(GEMM, 60, 0), "ph": "B"},
        {"ph": "E", "cat": "kernel", "pid": 0, "tid": 7, "ts": 70.0},
    ]
    return json.dumps({"deviceProperties": [], "traceEvents": events, "traceName": "x"}, indent=1).encode()


def fuzz(path: Path, seed: int, rounds: int) -> None:
    """Damage of any kind gives an answer or one finding."""
    draw = random.Random(seed)
    text = sound_trace()
    for _ in range(rounds):
        path.write_bytes(damaged(draw, text))
        try:
            said = profile_traces([path]).to_json()
        except FindingsError as error:
            assert len(error.findings) == 1, (seed, error)  # noqa: PT017
        else:
            json.dumps(said, allow_nan=False)


@pytest.mark.parametrize("seed", range(4))
def test_damage_of_any_kind(tmp_path: Path, seed: int) -> None:
    fuzz(tmp_path / "trace.json", seed, 150)


@pytest.mark.slow
def test_damage_drawn_anew(tmp_path: Path) -> None:
    """THREEFOLD_SEED repeats a draw."""
    seed = int(os.environ.get("THREEFOLD_SEED", random.SystemRandom().randrange(2**32)))
    print(f"THREEFOLD_SEED={seed}")
    fuzz(tmp_path / "trace.json", seed, 20_000)


def sound_export(path: Path) -> bytes:
    export = NsightExport(path)
    export.kernel(GEMM, 0, 100, correlationId=3)
    export.kernel(NCCL, 50, 150, stream=20)
    export.copy(150, 160)
    export.launch(-10, -5, 3)
    export.range("threefold.experts", -20, 0)
    return export.close().read_bytes()


@pytest.mark.parametrize("seed", range(2))
def test_damaged_exports(tmp_path: Path, seed: int) -> None:
    content = sound_export(tmp_path / "sound.sqlite")
    draw, path = random.Random(seed), tmp_path / "trace.sqlite"
    for _ in range(150):
        path.write_bytes(damaged(draw, content))
        try:
            profile_traces([path])
        except FindingsError as error:
            assert len(error.findings) == 1, (seed, error)  # noqa: PT017


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'x'",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = end + 1",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 1e300",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = 9223372036854775807",
        "DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL; DELETE FROM CUPTI_ACTIVITY_KIND_MEMCPY",
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL RENAME TO k; CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS WITH RECURSIVE "
        "n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS start, i AS end FROM n",
    ],
)
def test_exports_that_are_none(tmp_path: Path, statement: str) -> None:
    """A view in the place of a table is never read: it could work for ever."""
    path = tmp_path / "trace.sqlite"
    sound_export(path)
    database = sqlite3.connect(path)
    database.executescript(statement)
    database.close()
    refused(path)


def test_a_name_of_an_export_that_is_no_text(tmp_path: Path) -> None:
    """It is left out: the kernel goes by its number."""
    path = tmp_path / "trace.sqlite"
    sound_export(path)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE StringIds SET value = zeroblob(100)")
    database.close()
    assert profile_traces([path]).to_json()
