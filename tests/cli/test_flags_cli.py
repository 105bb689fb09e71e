"""Flags across verbs: one name, one meaning; `--json` everywhere; what is said of words that no verb knows."""

import argparse
from pathlib import Path

import pytest
from command_line import run
from repository import ROOT

from threefold.cli.command_line.inputs import duration, sequence_length
from threefold.cli.command_line.reference import PAGE, commands_page, flags_by_verb

RECIPE = str(ROOT / "recipes" / "deepseek-v3-128k-256xh100-fp8.toml")
# Where a flag takes something else in another verb, the reason why that is still one meaning.
DIFFERENT_VALUES = {
    "--rehearse": "`plan` has several candidates and counts those to rehearse, `check` has one plan",
    "--adapter": "`export-hf` writes adapters to --out, `import-hf` reads them from a folder",
    "--seq-len": "`plan` reads it as the field of a plan file, so that a wrong one is a finding",
    "--gpus": "`plan` also takes auto",
    "--rank": "`tune` refuses negative ones in the parser",
    "--seed": "`tune` refuses negative ones in the parser",
    "--out": "some verbs read it as text, others as a path",
    "--run": "`launch` writes it into a script, for another machine",
    "--tokenizer": "`tokenize` has a default of its own",
}
KINDS = {int: "whole number", float: "number", str: "text", Path: "text", None: "text"}


def kind(action: argparse.Action) -> tuple[str, ...]:
    """What a flag takes: nothing, or a kind of value, once or several times."""
    if action.nargs == 0:
        return ("nothing",)
    value = KINDS.get(action.type, getattr(action.type, "__name__", "?"))  # type: ignore[arg-type]
    choices = tuple(map(str, action.choices)) if action.choices else ()
    return (type(action).__name__, value, *choices)


def test_a_flag_means_the_same_in_every_verb() -> None:
    kinds: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for verb, flags in flags_by_verb().items():
        for flag, action in flags.items():
            kinds.setdefault(flag, {}).setdefault(kind(action), []).append(verb)
    assert len(kinds) > 60
    unequal = {flag: found for flag, found in kinds.items() if len(found) > 1 and flag not in DIFFERENT_VALUES}
    assert unequal == {}


def test_every_verb_takes_json() -> None:
    assert [verb for verb, flags in flags_by_verb().items() if "--json" not in flags] == []
    assert all(flags["--json"].nargs == 0 for flags in flags_by_verb().values())


def test_every_flag_says_what_it_is() -> None:
    silent = [(verb, flag) for verb, flags in flags_by_verb().items() for flag, one in flags.items() if not one.help]
    assert silent == []


def test_the_page_of_commands_is_that_of_the_parsers() -> None:
    assert (ROOT / PAGE).read_text(encoding="utf-8") == commands_page(), (
        f"write the page anew: python -m threefold.cli.command_line.reference > {PAGE}"
    )


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["chek", RECIPE], "did you mean check"),
        (["check", RECIPE, "--jsno"], "did you mean --json?"),
        (["check", RECIPE, "--explan=x"], "did you mean --explain"),
        (["check", RECIPE, "--target", "megatron"], "did you mean megatron-bridge?"),
        (["export", RECIPE, "--to", "megatronlm"], "did you mean megatron-lm"),
        (["completion", "bsh"], "did you mean bash"),
        (["check", "--explain", "ep-divides-expert"], "ep-divides-experts"),
        (["models", "qwen3-30b"], "qwen3-30b-a3b"),
    ],
)
def test_a_misspelt_word_is_met_with_what_was_meant(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(*words, capsys=capsys)
    assert (code, out) == (2, "")
    assert meant in err


def test_a_word_like_no_other_gets_no_guess(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run("check", RECIPE, "--zzzzqqq", capsys=capsys)
    assert code == 2
    assert "did you mean" not in err


@pytest.mark.parametrize(
    ("text", "value"), [("90", 90), ("90s", 90), ("8m", 480), ("1.5h", 5400), ("0.5", 0.5), ("1e3", 1000)]
)
def test_times_have_units(text: str, value: float) -> None:
    assert duration(text) == value


@pytest.mark.parametrize("text", ["", "m", "0", "-1", "nan", "inf", "1e99", "1.2.3", "8 days", "1e400"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        duration(text)


def test_lengths_have_units() -> None:
    assert [sequence_length(text) for text in ("4096", "32K", "32k", "1M")] == [4096, 32_768, 32_768, 1_048_576]
    for text in ("", "0", "-1", "K", "4.5K", "32G", "nan"):
        with pytest.raises(argparse.ArgumentTypeError):
            sequence_length(text)


@pytest.mark.parametrize("text", ["1T", "1.5T", "500B", "10M", "2000000"])
def test_tokens_have_units(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("estimate", RECIPE, "--tokens", text, "--json", capsys=capsys)[0] == 0


def test_sample_still_knows_its_older_flag() -> None:
    from threefold.cli.main import build_parser

    parser = build_parser("sample")
    assert parser.parse_args(["sample", "runs/x", "--tokens", "3"]).max_tokens == 3
    assert parser.parse_args(["sample", "runs/x"]).max_tokens == 200
