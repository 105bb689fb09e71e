"""Files of strangers, drawn at random: each maker writes one that is damaged or crafted, and the verbs that open it.

`tests/cli/test_hostile_files.py` runs them. A case says whether the file is bad for certain, so that a verb has to
refuse it, or damaged at random, so that it may still be sound.
"""

import gzip
import json
import pickle
import random
import shutil
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from damaged_files import ANY_FILE, DEEP, change_json, changed
from pictures import encoded, noise, picture_bomb, write_jsonl, write_tar
from snapshots import SnapshotFile, frames
from tiny_models import CONFIGS
from traces import GEMM, NsightExport, kernel, operator, write_trace

HUGE: tuple[Any, ...] = (10**9, 2**31, 2**63, 10**30, 10**300, 1e400, -1, float("nan"), 10**6)
WRONG: tuple[Any, ...] = (*HUGE, None, "8", "", "x" * 10**6, [], {}, [[]], True, 0.5, "1e9", [1] * 10**5, {"a": {}})
BOMBS: dict[str, bytes] = {
    "deep": DEEP,
    "deep objects": b'{"a":' * 50_000,
    "deep and closed": b"[" * 900 + b"]" * 900,
    "many lists": b"[" + b"[]," * (2**24 // 3) + b"[]]",
    "many objects": b'{"a": [' + b"{}," * (2**24 // 3) + b"{}]}",
    "digits": b'{"a": ' + b"9" * 10**6 + b"}",
    "a number": b"1e999999999",
    "a text": b'"' + b"x" * 2**24 + b'"',
    "escapes": b'{"a": "' + b"\\ud800" * 10**5 + b'"}',
    "nul": b"\0" * 10**6,
    "names": b"{" + b",".join(b'"%d":0' % n for n in range(500_000)) + b"}",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A hostile file and the command lines that open it."""

    what: str
    commands: list[list[str]]
    is_bad: bool = True  # every command has to refuse it
    is_plan: bool = False  # it is or describes a plan, of which rules may find several things


Maker = Callable[[Path, random.Random, Path], Case]  # of a new folder, a draw, and the folder of sound files


def _damage(path: Path, draw: random.Random, folder: Path, but: str = "") -> str:
    outside = folder / "outside"
    outside.mkdir()
    damage = draw.choice([damage for damage in ANY_FILE if damage.__name__ != but])
    damage(path, draw, outside)
    return f"{damage.__name__} {path.name}"


def hf_config(folder: Path, draw: random.Random, sound: Path) -> Case:
    family = draw.choice(sorted(CONFIGS))
    config, path = dict(CONFIGS[family]), folder / "hf" / "config.json"
    path.parent.mkdir()
    kind, is_bad = draw.randrange(6), True
    if kind == 0:
        name = draw.choice(sorted(BOMBS))
        path.write_bytes(BOMBS[name])
        what = f"a bomb ({name})"
    elif kind == 1:
        name = draw.choice([name for name, value in config.items() if type(value) is int and "token_id" not in name])
        config[name] = draw.choice([value for value in WRONG if value is not None])
        path.write_text(json.dumps(config))
        what, is_bad = f"{name} = {config[name]!r:.40}", False
    elif kind == 2:
        name = draw.choice(("num_hidden_layers", "vocab_size", "hidden_size", "num_attention_heads"))
        config[name] = draw.choice((10**9, 10**30, 2**63, -1, "2", 1e400, float("nan"), [2], 0.5, 0))
        path.write_text(json.dumps(config))
        what = f"{name} = {config[name]!r:.40}"
    elif kind == 3:
        nested: Any = config
        for _ in range(draw.choice((2, 90, 900))):
            nested = {"model_type": config["model_type"], "text_config": nested}
        path.write_text(json.dumps(nested))
        what, is_bad = "nested text_config", False
    elif kind == 4:
        path.write_text(json.dumps(config))
        change_json(path, draw, folder)
        what, is_bad = "changed", False
    else:
        path.write_text(json.dumps(config))
        what, is_bad = _damage(path, draw, folder), False
    plan = folder / "plan.toml"
    plan.write_text(f'model = "hf:{path.parent}"\n[job]\nseq_len = 32\nglobal_batch = 8\n', encoding="utf-8")
    opened = [
        *(["check", str(plan)], ["estimate", str(plan)], ["show", str(plan)], ["report", str(plan)]),
        ["sweep", str(plan), "--over", "job.micro_batch=1,2"],
        ["plan", "--model", f"hf:{path.parent}", "--chip", "h100", "--gpus", "8", "--seq-len", "4096"],
        ["import-hf", str(path.parent), "--out", str(folder / "run")],
        ["finetune", str(path.parent), "--data", str(sound / "chats.jsonl"), "--out", str(folder / "run")],
        ["dry-run", str(plan)],
    ]
    return Case(f"{family}, config.json: {what}", draw.sample(opened, 2), is_bad, is_plan=True)


def run_folder(folder: Path, draw: random.Random, sound: Path) -> Case:
    run = folder / "run"
    shutil.copytree(sound / "run", run)
    kind, is_bad = draw.randrange(5), False
    if kind == 0:
        files = sorted(path for path in run.rglob("*") if path.is_file())
        what = _damage(draw.choice(files), draw, folder)
    elif kind == 1:
        path = draw.choice(sorted(run.rglob("*.json")))
        name = draw.choice(sorted(BOMBS))
        path.write_bytes(BOMBS[name])
        what = f"{path.name}: a bomb ({name})"
    elif kind == 2:
        path = draw.choice(sorted(run.rglob("*.json")))
        change_json(path, draw, folder)
        what = f"changed {path.name}"
    elif kind == 3:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        place = draw.randrange(len(lines))
        lines[place][draw.choice(sorted(lines[place]))] = draw.choice(WRONG)
        extra = draw.choice(("", "{", "[" * 10_000, "[1]", '{"step": 1e400}', "x" * 10**7, '{"step": ' + "9" * 9999))
        (run / "metrics.jsonl").write_text("\n".join([*map(json.dumps, lines), extra]), encoding="utf-8")
        what = f"metrics.jsonl: {lines[place]!r:.60} {extra!r:.20}"
    else:
        text = (run / "plan.toml").read_text(encoding="utf-8").splitlines()
        place = draw.choice([number for number, line in enumerate(text) if "=" in line])
        text[place] = text[place].partition("=")[0] + "= " + draw.choice(("1e400", "[" * 500, "9" * 5000, '"x"', "nan"))
        (run / "plan.toml").write_text("\n".join(text), encoding="utf-8")
        what, is_bad = f"plan.toml: {text[place]:.60}", False
    opened = [
        *(["report", str(run)], ["profile", str(run)], ["compare", str(run), str(sound / "run")]),
        *(["compare", str(sound / "run"), str(run)], ["sample", str(run), "--max-tokens", "1"]),
        *(
            ["export-hf", str(run), "--out", str(folder / "hf")],
            ["train", str(sound / "longer.toml"), "--run", str(run)],
        ),
        ["eval", str(run), "--data", str(sound / "texts.jsonl"), "--tokenizer", "bytes", "--sequences", "1"],
    ]
    return Case(f"run folder, {what}", draw.sample(opened, 2), is_bad)


_TRIAL = {"steps": [0.1, 0.2], "losses": [1.0, 2.0], "peak_bytes": 5}


def ledger(folder: Path, draw: random.Random, sound: Path) -> Case:
    path, commands = folder / "ledger.sqlite", [["report", str(folder)], ["tune", "--show", str(folder)]]
    forever = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"
    tables = {
        "facts": "CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL);",
        "trials": "CREATE TABLE trials (id INTEGER PRIMARY KEY, stage TEXT, round INTEGER, role TEXT, session TEXT,"
        " plan TEXT, fields TEXT, began REAL, seconds REAL, measurement TEXT);",
        "verdicts": "CREATE TABLE verdicts (stage TEXT, role TEXT, value TEXT);",
    }
    table = draw.choice(sorted(tables))
    kind = draw.randrange(5)
    if kind == 0:
        views = {
            "facts": f"CREATE VIEW facts AS {forever} SELECT 'k' || x AS key, '1' AS value FROM c;",
            "trials": f"CREATE VIEW trials AS {forever} SELECT x AS id, 's' AS stage, 1 AS round, 'r' AS role, 'x' AS"
            " session, 'p' AS plan, '{}' AS fields, 1.0 AS began, 1.0 AS seconds, '{}' AS measurement FROM c;",
            "verdicts": f"CREATE VIEW verdicts AS {forever} SELECT 's' AS stage, 'r' || x AS role, 1 AS value FROM c;",
        }
        tables[table] = views[table]
        what = f"{table} is a view"
    elif kind == 1:
        tables[table] = draw.choice(
            (
                f"CREATE TABLE {table} (key TEXT, value TEXT AS (hex(zeroblob(500000000))));",
                f"CREATE VIRTUAL TABLE {table} USING fts5(key, value);",
                f"CREATE TABLE {table} (a);",
                "",
                tables[table] + f"CREATE TRIGGER t AFTER INSERT ON {table} BEGIN SELECT 1; END;",
            )
        )
        what = f"{table}: {tables[table][:60]}"
    else:
        what = "values"
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript("".join(tables.values()))
        if kind >= 2:
            measurement = json.dumps(changed(_TRIAL, draw)) if kind == 2 else draw.choice(("[", "{}", "[" * 99999, "7"))
            row = [1, "s", 1, "baseline", "x", "p", "{}", 1.0, 2.0, measurement]
            if kind == 4:
                row[draw.randrange(1, len(row))] = draw.choice(("NaN", b"\xff", 1e308, None, -1, "x" * 10**6))
            database.execute("INSERT INTO trials VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            contract = draw.choice(("{}", "[]", "null", '{"plan": 5, "hardware": []}', '{"hardware": {"chip": {}}}'))
            database.execute("INSERT INTO facts VALUES ('contract', ?)", (contract,))
            verdict = draw.choice(("{}", "[]", '{"verdict": "better", "gain": "x"}', '{"verdict": 5}', "{" * 9999))
            database.execute("INSERT INTO verdicts VALUES ('s', 'r', ?)", (verdict,))
            what = f"{row!r:.80} {contract} {verdict:.30}"
    if kind == 2 and draw.random() < 0.3:
        what = _damage(path, draw, folder)
    return Case(f"ledger, {what}", commands, kind < 2 and "ledger.sqlite" not in what)


def _sound_tokenizer(num_tokens: int = 0) -> dict[str, Any]:
    vocab = {chr(n): n - 33 for n in range(33, 127)} | {"Ġ": 94, "Ċ": 95}
    vocab |= {f"{chr(33 + n % 94)}{n}": 96 + n for n in range(num_tokens)}
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    space = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    return {"version": "1.0", "added_tokens": [], **empty, "pre_tokenizer": space, "decoder": space, "model": model}


def _replace(pattern: Any, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _grow(times: int, content: int) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [_replace({"String": "a"}, "a" * content)] * times}


def _nested(kind: str, name: str, inner: dict[str, Any], depth: int) -> dict[str, Any]:
    for _ in range(depth):
        inner = {"type": kind, name: [inner]}
    return inner


_NORMALIZERS: dict[str, dict[str, Any]] = {
    "grows": _grow(1, 10**7),
    "grows ten times": _grow(10, 100),
    "grows by a regex": _replace({"Regex": "(?=.)"}, "b" * 10**6),
    "prepends": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a" * 10**6}] * 1000},
    "nested": _nested("Sequence", "normalizers", {"type": "NFC"}, 60),
    "nested deep": _nested("Sequence", "normalizers", {"type": "NFC"}, 400),
    "precompiled": {"type": "Precompiled", "precompiled_charsmap": "AAAA" * 1000},
    "regex of megabytes": _replace({"Regex": "(a|b)" * 10**6}, "x"),
    "regex that repeats": _replace({"Regex": "((a{1,1000}){1,1000}){1,1000}"}, "x"),
    "regex of groups": _replace({"Regex": "(" * 5000 + "a" + ")" * 5000}, "x"),
}


def tokenizer(folder: Path, draw: random.Random, sound: Path) -> Case:
    path = folder / "tokenizer" / "tokenizer.json"
    path.parent.mkdir()
    made, is_bad, kind = _sound_tokenizer(), False, draw.randrange(9)
    what = ""
    if kind == 0:
        what = draw.choice(sorted(BOMBS))
        path.write_bytes(BOMBS[what])
        is_bad = True
    elif kind == 1:
        what = f"normalizer {draw.choice(sorted(_NORMALIZERS))}"
        made["normalizer"] = _NORMALIZERS[what.partition(" ")[2]]
    elif kind == 2:
        made = _sound_tokenizer(10**6)
        made["model"]["merges"] = [[chr(33 + n % 94), str(n)] for n in range(10**6)]
        what = "a million merges of what is no token"
        is_bad = True
    elif kind == 3:
        made["added_tokens"] = [
            {"id": 96 + n, "content": f"<{n}>", "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            for n in range(draw.choice((1000, 200_000)))
        ]
        what = f"{len(made['added_tokens'])} added tokens"
    elif kind == 4:
        name = draw.choice((2**31, 2**32 - 1, 2**32, -1, 10**30, 0.5, "a"))
        made["model"]["vocab"]["zz"] = name
        what, is_bad = f"a token {name}", True
    elif kind == 5:
        for _ in range(draw.randrange(1, 4)):
            made = changed(made, draw)
        what = "changed"
    elif kind == 6:
        regex = draw.choice(("(a+)+$", "(", "[" * 999, "(?<=a+)b", "\\p{Greek}" * 9999, "((((a*)*)*)*)*b"))
        made["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        what = f"regex {regex:.30}"
    elif kind == 7:
        settings = {
            "eos_token": draw.choice(WRONG),
            "chat_template": draw.choice(("{% if", "{% break %}", 5, "{{ x" * 999)),
        }
        (path.parent / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        what = f"settings {settings!r:.60}"
    else:
        (path.parent / "tokenizer_config.json").write_bytes(BOMBS[what := draw.choice(sorted(BOMBS))])
        what = f"tokenizer_config.json is {what}"
    if kind:
        path.write_text(json.dumps(made), encoding="utf-8")
    if draw.random() < 0.15 and not is_bad and isinstance(made, dict):
        what += f", {_damage(path, draw, folder)}"
    data = draw.choice(("texts.jsonl", "chats.jsonl"))
    job = [f"job.data={sound / data}", f"job.tokenizer={path.parent}", "job.steps=1"]
    opened = [
        ["tokenize", str(sound / data), "--out", str(folder / "out.tok"), "--tokenizer", str(path.parent)],
        ["train", str(sound / "plan.toml"), *job, "--run", str(folder / "run")],
        ["eval", str(sound / "run"), "--data", str(sound / data), "--tokenizer", str(path.parent)],
        ["sample", str(sound / "run"), "--prompt", "a", "--max-tokens", "1", "--tokenizer", str(path.parent)],
    ]
    return Case(f"tokenizer, {what}", draw.sample(opened, 2), is_bad)


def trace(folder: Path, draw: random.Random, sound: Path) -> Case:
    path = folder / draw.choice(("trace.json", "trace.json.gz"))
    events: list[Any] = [operator("aten::mm", 0, 10, 1), kernel(GEMM, 20, 10), kernel(GEMM, 40, 10)]
    kind, is_bad = draw.randrange(6), False
    if kind == 0:
        what = draw.choice(sorted(BOMBS))
        path.write_bytes(gzip.compress(BOMBS[what], 1) if path.suffix == ".gz" else BOMBS[what])
        is_bad = True
    elif kind == 1:
        path = folder / "trace.json.gz"
        path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * 2**28, 9))
        what, is_bad = "a bomb", True
    elif kind == 2:
        what = "changed"
        write_trace(path, [*(changed(event, draw) for event in events), *events[: draw.randrange(3)]])
    elif kind == 3:
        name = draw.choice(("ts", "dur", "pid", "tid", "name", "cat", "args"))
        events[1][name] = draw.choice(WRONG)
        write_trace(path, events)
        what = f"{name} = {events[1][name]!r:.40}"
    elif kind == 4:
        more: dict[str, Any] = {"deviceProperties": draw.choice(WRONG), "distributedInfo": draw.choice(WRONG)}
        write_trace(path, events, **more)
        what = f"{more!r:.60}"
    else:
        write_trace(path, events)
        what = _damage(path, draw, folder)
    opened = [
        ["profile", str(path)],
        ["compare", str(path), str(sound / "trace.json")],
        ["profile", str(path), "--json"],
    ]
    return Case(
        f"trace, {what}", [*draw.sample(opened, 1), ["profile", str(path), "--out", str(folder / "p.json")]], is_bad
    )


_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"


def nsight(folder: Path, draw: random.Random, sound: Path) -> Case:
    path = folder / "trace.sqlite"
    export = NsightExport(path)
    for number in range(5):
        export.kernel(GEMM, number * 100, number * 100 + 50, correlationId=number)
    export.launch(-10, -5, 3)
    export.close()
    forever = "WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c)"
    statements = [
        f"DROP TABLE {_KERNELS}; CREATE VIEW {_KERNELS} AS {forever} SELECT i AS start, i AS end FROM c",
        f"DROP TABLE {_KERNELS}; CREATE VIRTUAL TABLE {_KERNELS} USING fts5(start, end)",
        f"DROP TABLE {_KERNELS}; CREATE TABLE {_KERNELS} (start INTEGER AS (hex(zeroblob(1000000000))), end INTEGER)",
        f"DROP TABLE {_KERNELS}",
        f"UPDATE {_KERNELS} SET start = end + 1",
        f"UPDATE {_KERNELS} SET end = 'x'",
        f"UPDATE {_KERNELS} SET start = -9223372036854775807",
        f"UPDATE {_KERNELS} SET end = 9223372036854775807",
    ]
    others = [
        f"UPDATE {_KERNELS} SET deviceId = 'x', streamId = 'y', globalPid = 1e300",
        "UPDATE StringIds SET value = 5",
        "UPDATE StringIds SET value = zeroblob(10000000)",
        "DROP TABLE StringIds; CREATE VIEW StringIds AS SELECT 1 AS id, 'a' AS value",
        "DROP TABLE TARGET_INFO_GPU; CREATE TABLE TARGET_INFO_GPU (id, name, totalMemory)",
        "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET start = 1e300, nameId = 'x'",
        f'CREATE TABLE "a\'b""; --" (x); UPDATE {_KERNELS} SET correlationId = -5',
    ]
    kind = draw.random()
    if kind < 0.4:
        what = draw.choice(statements)
    elif kind < 0.75:
        what = draw.choice(others)
    else:
        what = _damage(path, draw, folder)
    if kind < 0.75:
        with closing(sqlite3.connect(path)) as database:
            database.executescript(what)
    opened = [["profile", str(path)], ["compare", str(path), str(sound / "trace.json")]]
    return Case(f"Nsight, {what}", opened, kind < 0.4)


def safetensors(folder: Path, draw: random.Random, sound: Path) -> Case:
    out = folder / "hf"
    shutil.copytree(sound / "hf", out)
    path = out / "model.safetensors"
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    key = draw.choice(sorted(header.keys() - {"__metadata__"}))
    kind, is_bad = draw.randrange(8), True
    raw = b""
    if kind == 0:
        claimed = draw.choice((2**63, 2**64 - 1, 2**40, 10**8, len(content), 0))
        path.write_bytes(struct.pack("<Q", claimed) + content[8:])
        what = f"a header of {claimed} bytes"
    elif kind == 1:
        header[key]["data_offsets"] = draw.choice(([0, 2**60], [5, 1], [0], [-4, 4], [0.5, 1], "x", [2**64, 2**65]))
        what = f"offsets {header[key]['data_offsets']}"
    elif kind == 2:
        first, second = sorted(header.keys() - {"__metadata__"})[:2]
        header[first]["data_offsets"] = header[second]["data_offsets"]
        what = "offsets overlap"
    elif kind == 3:
        header[key]["shape"] = draw.choice(([2**40, 2**40], [-1], [2**63], [1] * 10**5, "x", [0.5], [[1]], None))
        what = f"shape {header[key]['shape']!r:.40}"
    elif kind == 4:
        raw = draw.choice([BOMBS[name] for name in sorted(BOMBS)])
        what = f"a header {raw[:20]!r}"
    elif kind == 5:
        header |= {f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(300_000)}
        what, is_bad = "300000 tensors", False
    elif kind == 6:
        header = changed(header, draw)
        what, is_bad = "changed", False
    else:
        what, is_bad = _damage(path, draw, folder), False
    if kind not in (0, 7):
        raw = raw or json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    opened = [
        ["import-hf", str(out), "--out", str(folder / "run")],
        ["finetune", str(out), "--data", str(sound / "chats.jsonl"), "--out", str(folder / "run"), "--plan-only"],
        ["finetune", str(out), "--data", str(sound / "chats.jsonl"), "--out", str(folder / "run2"), "job.steps=1"],
    ]
    words = draw.choice(opened)
    return Case(f"safetensors, {what}", [words], is_bad and "--plan-only" not in words)  # which reads no tensor


def megatron(folder: Path, draw: random.Random, sound: Path) -> Case:
    """A .bin of tokens and an .idx: magic, version, dtype, counts, sizes, offsets, documents."""
    lengths = np.full(20, 30, np.int32)
    (folder / "data.bin").write_bytes(np.arange(600, dtype=np.int32).astype(np.int32).tobytes())
    starts = (np.cumsum(lengths) - lengths).astype(np.int64) * 4
    counts, dtype, version = [20, 21], 4, 1
    kind, is_bad = draw.randrange(6), True
    if kind == 0:
        place = draw.randrange(2)
        counts[place] = draw.choice((2**63, 2**64 - 1, 10**9, 10**12, 0, counts[place] + 1))
        what = f"counts {counts}"
    elif kind == 1:
        dtype, version = draw.choice(((0, 1), (255, 1), (7, 1), (4, 0), (4, 2**40)))
        what = f"dtype {dtype}, version {version}"
    elif kind == 2:
        lengths[draw.randrange(20)] = draw.choice((-1, 2**31 - 1, 10**6))
        what = "lengths"
    elif kind == 3:
        starts[draw.randrange(20)] = draw.choice((-8, 2**62, 2399, 1))
        what = "offsets"
    else:
        what, is_bad = "damaged", False
    head = b"MMIDIDX\x00\x00" + struct.pack("<Q", version) + struct.pack("<B", dtype)
    body = struct.pack("<QQ", *counts) + lengths.tobytes() + starts.tobytes()
    (folder / "data.idx").write_bytes(head + body + np.arange(21, dtype=np.int64).tobytes())
    if kind >= 4:
        what = _damage(draw.choice((folder / "data.idx", folder / "data.bin")), draw, folder)
    job = [f"job.data={folder / 'data'}", "job.steps=1", "job.val_data="]
    opened = [
        ["train", str(sound / "plan.toml"), *job[:2], "--run", str(folder / "run")],
        ["eval", str(sound / "run"), "--data", str(folder / "data.bin"), "--sequences", "1"],
    ]
    return Case(f"Megatron data, {what}", [draw.choice(opened)], is_bad)


def tables(folder: Path, draw: random.Random, sound: Path) -> Case:
    import pyarrow
    import pyarrow.parquet

    path = folder / "data.parquet"
    kind, is_bad = draw.randrange(5), False
    column: list[Any] = ["the cat"] * 50
    if kind == 0:
        column = [draw.choice([None, 5, [1], {"a": 1}])] * 50
        is_bad = True
    name = draw.choice(("text", "text", "messages", "x" * 5000))
    pyarrow.parquet.write_table(pyarrow.table({name: column}), path)
    what = f"{name:.20} {column[0]!r}"
    if kind == 1:
        content = bytearray(path.read_bytes())
        content[-8:-4] = struct.pack("<I", draw.choice((2**31 - 1, 2**32 - 1, 0, len(content))))
        path.write_bytes(content)
        what, is_bad = "length of the footer", True
    elif kind == 2:
        content = bytearray(path.read_bytes())
        for _ in range(draw.randrange(1, 30)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        path.write_bytes(content)
        what = "bytes"
    elif kind == 3:
        what = _damage(path, draw, folder)
    elif kind == 4:
        path.unlink()
        path = folder / "saved"
        path.mkdir()
        files = draw.choice(
            ([{"filename": "../x.arrow"}], [{"filename": 5}], 5, [{}] * 10**5, [{"filename": "/dev/zero"}])
        )
        (path / "state.json").write_text(json.dumps({"_data_files": files}), encoding="utf-8")
        what, is_bad = f"a saved dataset, {files!r:.40}", True
    opened = [
        ["tokenize", str(path), "--out", str(folder / "out.tok")],
        ["train", str(sound / "plan.toml"), f"job.data={path}", "job.tokenizer=bytes", "--run", str(folder / "run")],
    ]
    return Case(f"table, {what}", [draw.choice(opened)], is_bad)


def pictures(folder: Path, draw: random.Random, sound: Path) -> Case:
    """A tar shard or JSONL of images, all of which are bad."""
    good = encoded(noise(40, 40))
    kind = draw.randrange(6)
    bombs = {
        "side": picture_bomb(),
        "wide": picture_bomb(2**31 - 1),
        "cut": good[:60],
        "nothing": b"",
        "text": b"GIF89a",
    }
    name = draw.choice(sorted(bombs))
    what, is_bad = f"image {name}", False  # a run skips images that cannot be decoded, and says so
    record: Any = {"caption": "a"}
    if kind == 0:
        record, bombs[name] = draw.choice((5, [], {"caption": 5}, {"texts": WRONG[-1]})), good
        what = f"record {record!r:.40}"
    path = write_tar(
        folder / "data.tar",
        {f"{n}.{kind}": v for n in range(4) for kind, v in (("png", bombs[name]), ("json", record))},
    )
    if kind == 1:
        content = bytearray(path.read_bytes())
        content[124:136] = draw.choice((b"77777777777\0", b"\x80" + b"\xff" * 11, b"-0000000001\0"))
        path.write_bytes(content)
        what = "size in the header of a member"
    elif kind == 2:
        what, is_bad = _damage(path, draw, folder), False
    elif kind == 3:
        path = write_jsonl(
            folder / "data.jsonl", draw.choice((["[" * 9999], [{"images": ["/dev/zero"], "text": "x"}], [{}], [5]))
        )
        what = "JSONL"
    command = ["train", str(sound / "images.toml"), f"job.data={path}", "job.steps=1", "--run", str(folder / "run")]
    return Case(f"images, {what}", [command], is_bad)


def small_files(folder: Path, draw: random.Random, sound: Path) -> Case:
    """Plans, chip files, cards, exports of Bridge and results of `profile --json`."""
    name = draw.choice(sorted(BOMBS))
    content = BOMBS[name]
    toml = {
        "deep": b"a = " + DEEP,
        "keys": b"".join(b"a%d = 1\n" % n for n in range(50_000)),
        "dots": b".".join([b"a"] * 90) + b" = 1\n",
        "tables": b"".join(b"[a%d.b]\n" % n for n in range(20_000)),
        "digits": b"model = " + b"9" * 5000,
        "text": b'model = "' + b"x" * 10**6 + b'"',
        "inline": b"a = " + b"{a = " * 400,
        "lists": b"[[job]]\n" * 50_000,
    }
    yaml = {
        "laughs": b"a: &a [x,x,x,x,x,x,x,x,x]\n"
        + b"".join(b"%c: &%c [%s]\n" % (n, n, b",".join([b"*%c" % (n - 1)] * 9)) for n in range(98, 110)),
        "cycle": b"model: &a\n  x: *a\n",
        "deep": b"[" * 3000,
        "object": b"model: !!python/object/apply:os.system ['touch executed']\n",
        "merge": b"a: &a {x: 1}\nmodel:\n  <<: [" + b"*a," * 5000 + b"*a]\n",
        "date": b"model:\n  num_layers: 99999-99-99\n",
    }
    (folder / "x.toml").write_bytes(toml[kind := draw.choice(sorted(toml))])
    (folder / "x.yaml").write_bytes(yaml[other := draw.choice(sorted(yaml))])
    (folder / "x.json").write_bytes(content)
    plan, table = str(sound / "plan.toml"), str(folder / "x.toml")
    opened = [
        (
            f"plan {kind}",
            [[verb, table] for verb in draw.sample(("check", "estimate", "show", "report", "dry-run"), 2)],
        ),
        (f"chip file {kind}", [["estimate", plan, "--chip-file", table]]),
        (f"card {kind}", [["card", "list", table], ["card", "check", table, "--evidence"]]),
        (f"YAML {other}", [["import", str(folder / "x.yaml")]]),
        (f"profile {name}", [["compare", str(folder / "x.json"), str(sound / "trace.json")]]),
    ]
    what, commands = draw.choice(opened)
    return Case(what, commands, is_plan=True)


def job_files(folder: Path, draw: random.Random, sound: Path) -> Case:
    """What a dead job left behind: logs, memory snapshots and dumps of the flight recorder."""
    kind = draw.choice(("log", "log", "log", "snapshot", "pickle", "dump", "run"))
    if kind == "log":
        what, content = draw.choice(sorted(_hostile_logs(draw).items()))
        path = folder / "job.log"
        path.write_bytes(gzip.compress(content, 1) if draw.random() < 0.3 else content)
        if draw.random() < 0.3:
            # A log is read as far as it goes: one of 64 GiB takes its time.
            what = f"{what}, {_damage(path, draw, folder, but='grow')}"
    elif kind == "snapshot":
        path = _snapshot(folder / "snapshot.pickle", draw)
        what = _damage(path, draw, folder) if draw.random() < 0.5 else "strange values"
    elif kind == "pickle":
        what, content = draw.choice(sorted(HOSTILE_PICKLES.items()))
        path = folder / draw.choice(("snapshot.pickle", "nccl_trace_rank_0"))
        path.write_bytes(content)
    elif kind == "dump":
        path = folder / "nccl_trace_rank_0"
        entry = {"collective_seq_id": 1, "pg_id": 0, "state": "scheduled", "profiling_name": "nccl:all_reduce"}
        entry |= {name: draw.choice(WRONG) for name in draw.sample(("input_sizes", "p2p_seq_id", *entry), 2)}
        dump = {
            "version": "2.9",
            "pg_config": draw.choice(({}, WRONG[5], [1])),
            "entries": [entry] * draw.choice((1, 5000)),
        }
        path.write_bytes(draw.choice((pickle.dumps(dump), json.dumps(dump, default=str).encode())))
        what = f"{entry!r:.80}"
    else:
        path = folder / "run"
        shutil.copytree(sound / "run", path)
        what = _damage(draw.choice(sorted(file for file in path.rglob("*") if file.is_file())), draw, folder)
    commands = [["diagnose", str(path)], ["diagnose", str(path), "--plan", str(sound / "plan.toml"), "--json"]]
    return Case(f"{kind}: {what}", [draw.choice(commands)], is_bad=False)


def _hostile_logs(draw: random.Random) -> dict[str, bytes]:
    step = b"step %s/%s  loss %s  grad norm %s  lr %s  %s tokens/s\n"
    numbers = [b"9" * 400, b"1e999", b"-1", b"nan", b"0x7f", b"1_000", b"9" * 25]
    error = b"[rank%d]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate %s GiB.\n"
    rank = b"[rank7]: Traceback (most recent call last):\n" + b'[rank7]:   File "x.py", line 1, in f\n' * 3
    return {
        "one line": b"x" * 2**26,
        "one line of open brackets": b"[" * 2**24,
        "numbers of steps": b"".join(step % tuple(draw.choice(numbers) for _ in range(6)) for _ in range(5000)),
        "ranks without an end": b"".join(error % (10**n, b"9" * n) for n in range(1, 60)) * 50,
        "tracebacks": (rank + b"[rank7]: RuntimeError: \x1b[31m" + b"a" * 3000 + b"\n") * 3000,
        "templates": b"".join(b"%x ERROR %x\n" % (draw.getrandbits(80), draw.getrandbits(80)) for _ in range(200_000)),
        "bytes": draw.randbytes(10**6).replace(b"\0", b"\n"),
        "carriage returns": b"step 1\r" * 10**6,
        "a table of arguments": b"  seq_length .... " + b"9" * 10**6 + b"\n  num_layers .... [[[[\n" * 1000,
        "JSON in lines": b'{"model": {"flavor": ' + b"[" * 9000 + b"\n" + (b'{"a":' * 300 + b"\n") * 2000,
        "NCCL watchdog": b"Watchdog caught collective operation timeout: WorkNCCL(SeqNum=%s, OpType=ALLREDUCE)\n"
        % (b"9" * 99),
    }


def _trap(path: str) -> bytes:
    return b"\x80\x04cposix\nsystem\nX" + struct.pack("<I", len(path) + 6) + b"touch " + path.encode() + b"\x85R."


# Each begins as a pickle of a snapshot or a dump does, so that it is taken for one.
_MARKS = b"".join(b"X" + struct.pack("<I", len(word)) + word + b"0" for word in (b"device_traces", b"segments"))
_DUMP_MARK = b"X\x09\x00\x00\x00pg_config0"
HOSTILE_PICKLES: dict[str, bytes] = {
    f"{name} as {what}": b"\x80\x04" + marks + content
    for what, marks in (("a snapshot", _MARKS), ("a dump", _DUMP_MARK))
    for name, content in {
        "a trap": _trap("executed")[2:],
        "nested lists": b"]" * 200_000 + b"a" * 199_999 + b".",
        "doubled": b"]" + b"".join(b"2\x86" for _ in range(60)) + b".",
        "a long number": b"\x8b" + struct.pack("<i", 2**24) + b"\x7f" * 2**24 + b".",
        "less than no bytes": b"\x8b" + struct.pack("<i", -5) + b".",
        "a memo far away": b"Nr\xff\xff\xff\x7f.",
        "a frame of 2^60": b"\x95" + struct.pack("<Q", 2**60) + b"N.",
        "no end": b"]" * 1000,
        "a list in itself": b"]q\x00h\x00a.",
        "a dict in itself": b"}q\x00X\x07\x00\x00\x00entriesh\x00s.",
    }.items()
}


def _snapshot(path: Path, draw: random.Random) -> Path:
    """A memory snapshot in which some values are others."""
    file = SnapshotFile()
    file.segment(2**20, 2**24)
    file.alloc(2**20, 2**20, frames("model.py:3 forward"))
    file.oom(2**30, 2**20)
    content = file.content()
    for _ in range(draw.randint(1, 4)):
        event = draw.choice([*content["device_traces"][0], content["segments"][0], *content["segments"][0]["blocks"]])
        event[draw.choice(sorted(event))] = draw.choice(WRONG)
    if draw.random() < 0.2:
        content[draw.choice(sorted(content))] = draw.choice(WRONG)
    path.write_bytes(pickle.dumps(content))
    return path


MAKERS: dict[str, Maker] = {
    "config": hf_config,
    "job": job_files,
    "run": run_folder,
    "ledger": ledger,
    "tokenizer": tokenizer,
    "trace": trace,
    "Nsight": nsight,
    "safetensors": safetensors,
    "Megatron": megatron,
    "table": tables,
    "images": pictures,
    "small": small_files,
}
