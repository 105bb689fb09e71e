"""The page around drawings: head, style, script, navigation, and the parts that a report and the explorer share.

A page is one file. Its policy allows its own style and the one script whose hash it names, and no network: markup that
got in by mistake could not run or send anything.
"""

import base64
import hashlib
import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import threefold
from threefold.findings import Finding, as_overrides
from threefold.report.html.markup import NOTHING, Markup, tag

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src '{script}'; connect-src {connect}; "
    "base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page with a heading and a link to it."""

    anchor: str
    title: str
    body: Markup


@cache
def asset(name: str) -> str:
    """The text of a file beside this module."""
    return files("threefold.report.html").joinpath(name).read_text(encoding="utf-8")


def page(
    title: str,
    head: Markup,
    sections: Sequence[Section],
    script: str = "",
    connect: str = "'none'",
    class_: str | None = None,
) -> str:
    """A whole page. `script` goes behind that of every page; `connect` is where it may ask, none for a file."""
    code = asset("page.js") + script
    links = [tag("a", one.title, href=f"#{one.anchor}") for one in sections]
    nav = tag("nav", *links, aria_label="Sections") if len(links) > 1 else NOTHING
    body = [
        tag("section", tag("h2", one.title), one.body, id=one.anchor) if one.title else one.body for one in sections
    ]
    policy = _POLICY.format(script=script_hash(code), connect=connect)
    return "<!DOCTYPE html>\n" + tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("meta", name="referrer", content="no-referrer"),
            tag("title", title),
            tag("style", Markup(asset("style.css"))),
        ),
        tag(
            "body",
            tag("a", "Skip to the content", href="#content", class_="skip"),
            tag("header", _bar(), head),
            nav,
            tag("main", *body, id="content"),
            tag("footer", f"threefold {threefold.__version__}"),
            tag("div", id="tip", role="status", hidden=True),
            tag("script", Markup(code)),
            class_=class_,
        ),
        lang="en",
    )


def script_hash(code: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()


def _bar() -> Markup:
    name = tag("span", "threefold", class_="brand")
    toggle = tag("button", "Theme: auto", type="button", id="theme", aria_label="Theme of the page: auto")
    return tag("div", name, toggle, class_="bar")


@dataclass(frozen=True, slots=True)
class Tile:
    """One number that matters, with what it is and how it is known."""

    name: str
    value: str
    unit: str = ""
    note: str = ""
    mood: str = ""  # "good" or "bad" where the number is a verdict


def tiles(each: Iterable[Tile]) -> Markup:
    found = []
    for one in each:
        value = tag("dd", one.value, tag("span", f" {one.unit}", class_="unit") if one.unit else NOTHING)
        note = tag("dd", one.note, class_="note") if one.note else NOTHING
        found.append(tag("div", tag("dt", one.name), value, note, class_=f"tile {one.mood}".strip()))
    return tag("dl", *found, class_="tiles")


def findings_list(findings: Sequence[Finding], settable: Container[str] = ()) -> Markup:
    """Findings with their fixes. A fix whose fields are all `settable` on the page has a button that applies it."""
    if not findings:
        return tag("p", "No findings: the rules accept this plan.", class_="none")
    return tag("ul", *(_finding(one, settable) for one in findings), class_="findings")


def _finding(one: Finding, settable: Container[str]) -> Markup:
    marks = {"error": "✕", "warning": "!", "note": "i"}
    badge = tag("span", marks[one.severity], class_="badge", aria_hidden="true")
    head = tag("p", badge, tag("strong", f"{one.severity} "), tag("code", one.rule), " ", tag("code", one.at))
    parts = [head, tag("p", one.problem)]
    ways: list[tuple[str, Mapping[str, Any], str]] = []
    if one.fix_text:
        ways.append((one.fix_kind if one.fix else "advice", one.fix or {}, one.fix_text))
    ways += [("or", changes, f"{as_overrides(changes)}; {effect}") for changes, effect in one.alternatives]
    for kind, changes, words in ways:
        said = [tag("span", f"{kind} "), tag("code", words)]
        if changes and all(path in settable for path in changes):
            said.append(tag("button", "Apply", type="button", data_fix=_json(dict(changes)), class_="small"))
        parts.append(tag("p", *said, class_="fix"))
    return tag("li", *parts, class_=one.severity)


def _json(value: object) -> str:
    return json.dumps(value, default=list)


def copied_text(words: str, label: str) -> Markup:
    """Text to copy, with a button that does it."""
    button = tag("button", "Copy", type="button", data_copy=True, aria_label=f"Copy {label}", class_="small")
    return tag("div", button, tag("pre", tag("code", words), tabindex=0), class_="copied")
