"""Words stand for expressions: what they rule out, no expression would have found."""

import random
import re
from dataclasses import replace

import pytest
from job_logs import DEATHS, HARMLESS, UNKNOWN

from threefold.diagnose.deaths.catalogue import ROLES, Death, catalogue, deaths_in
from threefold.diagnose.deaths.expression_words import any_of, words_of

_ERROR = re.compile(
    r"Error|error\b|\[Errno|Exception|[Aa]ssert|FATAL|[Ff]atal|[Ff]ail(?:s|ed|ure)|[Cc]annot|[Cc]an't|denied|exceeded"
    r"|exiting|[Mm]ismatch|not match"
)


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("CUDA out of memory", {"cuda out of memory"}),
        (r"\bMemoryError\b", {"memoryerror"}),
        (r"(?:red|green) apples?", {" apple"}),
        (r"(?:red|green)\d", {"red", "green"}),
        (r"x(?:ab)+\d*longer", {"longer"}),
        (r"(?:short)?as long", {"as long"}),
    ],
)
def test_words_of_an_expression(expression: str, words: set[str]) -> None:
    assert words_of(expression) == words


@pytest.mark.parametrize("expression", [r"\d+", r"(?:red|\w+)", "(?:red)?"])
def test_an_expression_without_a_word_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match="matches anything"):
        words_of(expression)


def test_any_of_many_words_is_found() -> None:
    draw = random.Random(1)
    for _ in range(200):
        words = ["".join(draw.choices("abc.", k=draw.randint(1, 4))) for _ in range(draw.randint(1, 8))]
        pattern = re.compile(any_of(words))
        for _ in range(20):
            text = "".join(draw.choices("abcd.", k=12))
            assert (pattern.search(text) is not None) == any(word in text for word in words)


def by_every_expression(text: str) -> list[Death]:
    found = []
    for death in catalogue():
        if any(pattern.search(text) for pattern in death.match):
            found.append(death)
        elif any(pattern.search(text) for pattern in death.hints):
            found.append(replace(death, is_vague=True, is_hinted=True))
    found = [death for death in found if not death.in_errors or _ERROR.search(text)]
    follows = ("aftermath", "notice")
    return sorted(
        found, key=lambda death: (death.role in follows, death.is_hinted, death.is_vague, ROLES.index(death.role))
    )


def test_the_catalogue_finds_what_every_expression_by_itself_finds() -> None:
    texts = [line for row in (*DEATHS, *UNKNOWN) for line in row.lines] + HARMLESS
    assert sum(bool(deaths_in(text)) for text in texts) > 90
    for text in texts:
        assert deaths_in(text) == by_every_expression(text)
