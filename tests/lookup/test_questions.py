"""Questions of the field are answered by a few commands: the outputs hold the expected facts."""

import contextlib
import io
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from threefold.cli.main import main

QUESTIONS: list[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "questions.toml").read_text())["question"]
MOST_COMMANDS = 4


def printed(line: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        assert main(line.split()) in (0, 1), line
    return " ".join(out.getvalue().lower().split())


@pytest.fixture(scope="module")
def answers() -> list[list[str]]:
    """What the commands of each question print, in lower case and on one line."""
    with contextlib.chdir(ROOT):
        return [[printed(line) for line in question["commands"]] for question in QUESTIONS]


def has(text: str, words: list[str]) -> bool:
    """Whether the text has each of the words by itself, or one of its alternatives."""
    return all(
        any(re.search(rf"(?<!\w)(?<!\d\.){re.escape(one.lower())}(?!\w)", text) for one in word.split("|"))
        for word in words
    )


def test_there_are_sixty_questions_of_at_most_four_commands() -> None:
    assert len(QUESTIONS) >= 60
    assert [question["ask"] for question in QUESTIONS if len(question["commands"]) > MOST_COMMANDS] == []


def test_nearly_all_facts_are_in_the_answers(answers: list[list[str]]) -> None:
    """The strings of a fact stand in the output of one command."""
    missing = [
        (question["ask"], fact[0])
        for question, texts in zip(QUESTIONS, answers, strict=True)
        for fact in question["facts"]
        if not any(has(text, fact[1:]) for text in texts)
    ]
    facts = sum(len(question["facts"]) for question in QUESTIONS)
    assert len(missing) <= 0.05 * facts, missing


def test_other_answers_lack_the_facts(answers: list[list[str]]) -> None:
    """The strings say something: the answer to another question has few of them."""
    others = [*answers[7:], *answers[:7]]
    held = [
        any(has(text, fact[1:]) for text in texts)
        for question, texts in zip(QUESTIONS, others, strict=True)
        for fact in question["facts"]
    ]
    assert sum(held) < 0.25 * len(held)


def test_a_command_names_only_what_was_asked_or_found(answers: list[list[str]]) -> None:
    """Names of rules, settings and recipes are known from the question or from an earlier answer."""
    for question, texts in zip(QUESTIONS, answers, strict=True):
        known = " ".join(question["ask"].lower().replace("?", " ").split())
        known += " " + known.replace(" ", "_")
        for line, text in zip(question["commands"], texts, strict=True):
            names = [word.lower() for word in line.split() if re.search(r"\w[_/]\w", word) or "--explain" in line]
            named = [word for word in names if word not in ("check", "--explain") and word not in known]
            assert named == [], (question["ask"], line)
            known += " " + text
