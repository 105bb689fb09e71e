"""Words of the command line: counts, names, numbers, and what is said of a name that is not known."""

import json
import re

import pytest
from command_line import run
from repository import ROOT

from threefold.cli.main import main
from threefold.findings import nearest
from threefold.rules.all import known_slugs
from threefold.spec.chips import CHIPS
from threefold.spec.models import MODELS
from threefold.units import format_many, format_number

ONE_RANK = str(ROOT / "recipes" / "tiny-qwen3-moe-256-1xcpu-fp32.toml")
MANY_CALLS = str(ROOT / "recipes" / "deepseek-v3-128k-256xh100-fp8.toml")


@pytest.mark.parametrize("name", ["mi300x", "mi325x", "MI355X", "v100", "l40s", "tpu-v5p", "gaudi3"])
def test_a_chip_of_another_maker_is_no_misspelling(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "qwen3-30b-a3b", "--gpus", "16", "--seq-len", "4096", "--chip", name]
    code, out, _ = run(*words, capsys=capsys)
    assert code == 1
    assert "fix:" not in out
    assert f"choices: {', '.join(CHIPS)}" in out


@pytest.mark.parametrize(
    ("name", "meant"), [("h1000", "h100"), ("H-100", "h100"), ("gb20", "gb200"), ("b-300", "b300"), ("cpus", "cpu")]
)
def test_a_misspelt_chip_is_found(name: str, meant: str) -> None:
    assert nearest(name.lower(), CHIPS)[0] == meant


@pytest.mark.parametrize("name", ["nosuch", "qwen3-30b"])
def test_no_message_about_a_model_ends_in_nothing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run("models", name, capsys=capsys)
    assert code == 2
    assert re.search(r"no model '\S+'; \S", err)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_shown_without_python(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("models", name, capsys=capsys)
    assert code == 0
    assert not re.search(r"[{}\[\]]|\bTrue\b|\bFalse\b|\bNone\b|'\w+':", out)
    if MODELS[name].moe:
        assert re.search(r"^moe\.num_experts +\d+$", out, re.M)


def test_counts_agree_with_their_noun(capsys: pytest.CaptureFixture[str]) -> None:
    assert [format_many(count, "rank") for count in (0, 1, 2, 4096)] == ["0 ranks", "1 rank", "2 ranks", "4096 ranks"]
    assert format_many(2, "microbatch") == "2 microbatches"
    for verb in ("show", "estimate", "check"):
        out = run(verb, ONE_RANK, capsys=capsys)[1]
        assert not re.search(r"\b1 (ranks|chunks|microbatches|errors|warnings)\b", out)
    words = ["--model", "tiny-qwen3-moe", "--chip", "cpu", "--gpus", "1", "--seq-len", "64", "--global-batch", "1"]
    assert not re.search(r"\b1 (ranks|chunks|microbatches)\b", run("plan", *words, capsys=capsys)[1])


def test_large_numbers_have_no_exponent(capsys: pytest.CaptureFixture[str]) -> None:
    assert [format_number(value) for value in (45_380.4, 999.96, 3.14159, 0.0)] == ["45,380", "1000", "3.142", "0"]
    for plan in (MANY_CALLS, ONE_RANK):
        code, out, _ = run("estimate", plan, capsys=capsys)
        assert code == 0
        assert not re.search(r"\de\+\d", out)


def test_every_slug_is_listed_with_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "--json"]) == 0
    listed = {entry["rule"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert set(listed) == set(known_slugs())
    page = (ROOT / "docs" / "reference" / "findings.md").read_text(encoding="utf-8")
    assert all(f"\n## {entry['page'].partition('#')[2]}\n" in page for entry in listed.values())
    assert main(["rules", "--markdown"]) == 0
    assert capsys.readouterr().out == page, (
        "write the page anew: threefold rules --markdown > docs/reference/findings.md"
    )


@pytest.mark.parametrize(
    ("slug", "severity"), [("overlap-switch-couples", "warning"), ("known-value", "error"), ("host-wall", "note")]
)
def test_an_explanation_names_the_severity_that_check_gives(
    slug: str, severity: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--explain", slug]) == 0
    assert capsys.readouterr().out.startswith(f"{slug} ({severity}; ")
