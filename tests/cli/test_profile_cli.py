"""`threefold profile` as a command: its JSON, what it writes, and how it refuses."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from command_line import run
from repository import ROOT
from traces import GEMM, NCCL, OPAQUE, NsightExport, annotation, kernel, launch, operator, write_trace

RECIPE = ROOT / "recipes" / "qwen3-30b-a3b-4k-16xh100-bf16-no-overlap.toml"
NUMBER, NULLABLE = {"type": "number"}, {"type": ["number", "null"]}
AXIS = {
    "type": "object",
    "properties": {"total_seconds": NUMBER, "exposed_seconds": NUMBER, "hidden_fraction": NULLABLE},
    "required": ["total_seconds", "exposed_seconds", "hidden_fraction"],
}
WALLS = {
    "type": "object",
    "properties": {
        "communication": {
            **AXIS,
            "properties": {**AXIS["properties"], "by_axis": {"type": "object", "additionalProperties": AXIS}},
            "required": ["total_seconds", "exposed_seconds", "hidden_fraction", "by_axis"],
        },
        **{name: {"type": "object"} for name in ("memory", "link", "host", "compute", "unknown")},
    },
    "required": ["memory", "communication", "host", "compute", "unknown"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "span_seconds": NUMBER,
        "walls": WALLS,
        "dominant": {"enum": ["memory", "communication", "host", "compute", "unknown"]},
        "confidence": {"type": "number", "minimum": 0, "maximum": 1},
        "fixes": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"set": {"type": "object"}, "why": {"type": "string"}, "predicted_gain": NULLABLE},
                "required": ["set", "why", "predicted_gain"],
            },
        },
        "longest": {
            "type": "array",
            "items": {"type": "object", "required": ["name", "shape", "kind", "calls", "seconds"]},
        },
        "part_seconds": {"type": "object", "additionalProperties": NUMBER},
        "devices": {"type": "array", "items": {"type": "object", "required": ["span_seconds", "walls"]}},
        "job": {
            "type": "object",
            "required": ["slowest", "representatives", "capture", "ranks", "collectives", "opportunities", "claims"],
        },
    },
    "required": [
        "span_seconds",
        "walls",
        "dominant",
        "confidence",
        "fixes",
        "longest",
        "part_seconds",
        "devices",
        "job",
    ],
    "additionalProperties": False,
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    events = [
        annotation("threefold.step", 0, 200),
        annotation("threefold.experts", 0, 30),
        operator("aten::mm", 0, 20, 1),
        launch(5, 2, 1),
        kernel(GEMM, 30, 70, correlation=1, external=1),
        kernel(NCCL, 60, 100, stream=20, operation="all_to_all", description="ep"),
        kernel(OPAQUE, 170, 10),
    ]
    return write_trace(tmp_path / "trace.json.gz", events)


def test_json_has_the_documented_form(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--plan", str(RECIPE)]):
        code, out, _ = run("profile", str(trace), "--json", *more, capsys=capsys)
        assert code == 0
        said = json.loads(out)
        jsonschema.validate(said, SCHEMA)
        assert said["span_seconds"] == pytest.approx(150e-6)
        assert said["walls"]["communication"]["by_axis"]["ep"]["exposed_seconds"] == pytest.approx(60e-6)
        assert said["walls"]["unknown"]["total_seconds"] == pytest.approx(10e-6)


def test_the_text_names_the_wall_and_its_cures(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("profile", str(trace), "--plan", str(RECIPE), capsys=capsys)
    assert code == 0
    assert "the wall is communication" in out
    assert "knobs.ep_overlap=true" in out
    assert "threefold.experts" in out
    assert "kernels that nothing explains: 'kernel_7f3a'" in out


def test_the_order_of_the_output(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Verdict, capture quality, budget of a step, ranks, opportunities, status of the claims."""
    _, out, _ = run("profile", str(trace), capsys=capsys)
    heads = ("the wall is", "capture:", "a step of", "ranks,", "at most to gain", "how sure each claim is")
    places = [out.index(head) for head in heads]
    assert places == sorted(places)


def test_an_annotated_trace_keeps_the_original(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("out.json.gz", "out.trace.json"):
        out = tmp_path / name
        assert run("profile", str(trace), "--out", str(out), capsys=capsys)[0] == 0
        content = out.read_bytes()
        found = json.loads(gzip.decompress(content) if name.endswith(".gz") else content)
        before = json.loads(gzip.decompress(trace.read_bytes()))
        count = len(before["traceEvents"])
        assert found["traceEvents"][:count] == before["traceEvents"]
        assert {name: value for name, value in found.items() if name != "traceEvents"} == {
            name: value for name, value in before.items() if name != "traceEvents"
        }
        added = [event for event in found["traceEvents"][count:] if event["ph"] == "X"]
        assert [(event["name"], event["ts"], event["dur"]) for event in added] == [
            ("exposed communication", 100, 60),
            ("idle", 160, 10),
            ("unknown kernels", 170, 10),
        ]
        assert run("profile", str(out), capsys=capsys)[0] == 0  # and it can be profiled again


def test_an_annotated_trace_of_an_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = NsightExport(tmp_path / "a.sqlite")
    export.kernel(GEMM, 0, 1000)
    export.kernel(NCCL, 500, 2000, stream=20)
    out = tmp_path / "out.json.gz"
    assert run("profile", str(export.close()), "--out", str(out), capsys=capsys)[0] == 0
    events = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert [event["args"]["class"] for event in kernels] == ["compute", "communication"]
    code, text, _ = run("profile", str(out), "--json", capsys=capsys)
    assert code == 0
    assert json.loads(text)["walls"]["communication"]["exposed_seconds"] == pytest.approx(1e-6)


def test_the_trace_itself_is_not_overwritten(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = trace.read_bytes()
    code, _, err = run("profile", str(trace), "--out", str(trace), capsys=capsys)
    assert code == 1
    assert "this is the trace that is read" in err
    assert trace.read_bytes() == before


@pytest.mark.parametrize(
    ("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".html", b"<!DOCTYPE html>")]
)
def test_pictures(trace: Path, tmp_path: Path, suffix: str, begins: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / f"walls{suffix}"
    assert run("profile", str(trace), "--out", str(out), capsys=capsys)[0] == 0
    content = out.read_bytes()
    assert content.startswith(begins)
    assert b"http://" not in content.replace(b"http://www.w3.org", b"").replace(b"http://purl.org", b"").replace(
        b"http://creativecommons.org", b""
    )


def test_parts_of_a_bar_add_up_to_the_span(trace: Path) -> None:
    pytest.importorskip("matplotlib")
    from threefold.profile.analyze import profile_traces
    from threefold.report.plots import time_by_part

    top = profile_traces([trace]).top
    assert sum(time_by_part(top).values()) == pytest.approx(top.span_seconds)


def test_json_can_be_written_beside_the_text(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "walls.json"
    code, text, _ = run("profile", str(trace), "--out", str(out), capsys=capsys)
    assert code == 0
    assert text.startswith("measured: ")
    jsonschema.validate(json.loads(out.read_text()), SCHEMA)


def test_wrong_command_lines_and_files(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("profile", capsys=capsys)[0] == 2
    assert run("profile", str(trace), "--out", "walls.txt", capsys=capsys)[0] == 2
    assert run("profile", str(trace), "--unprofiled", "0", capsys=capsys)[0] == 2
    assert run("profile", str(trace), "--out", str(tmp_path / "no" / "x.json"), capsys=capsys)[0] == 1
    bad = tmp_path / "bad.toml"
    bad.write_text("model = ")
    assert run("profile", str(trace), "--plan", str(bad), capsys=capsys)[0] == 1
    code, out, _ = run("profile", str(tmp_path / "missing.json"), "--json", capsys=capsys)
    assert code == 1
    (finding,) = json.loads(out)["findings"]
    assert finding["rule"] == "trace-readable"
    assert "missing.json" in finding["at"]


def test_findings_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for slug in ("trace-readable", "trace-has-work"):
        code, out, _ = run("check", "--explain", slug, capsys=capsys)
        assert code == 0
        assert "raised by profiling" in out


def test_profiling_never_loads_torch(trace: Path) -> None:
    program = (
        f"import sys, threefold.cli.main as m; m.main(['profile', {str(trace)!r}]); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600, capture_output=True)
