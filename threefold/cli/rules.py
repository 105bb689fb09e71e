"""`threefold rules`: every finding there is, by its slug."""

import argparse
from collections.abc import Iterator
from textwrap import wrap

from threefold.cli.command_line.out import print_json
from threefold.findings import Explanation
from threefold.report.terminal import table
from threefold.rules.all import RULES, explain, known_slugs, raised_by, severity_of
from threefold.spec.megatron import bridge_releases, places

PAGE = "docs/reference/findings.md"
WIDTH = 118  # of its lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="machine-readable output")
    form.add_argument("--markdown", action="store_true", help=f"the page that explains each ({PAGE})")


def run(args: argparse.Namespace) -> int:
    slugs = sorted(known_slugs(), key=lambda slug: (raised_by(slug), RULES[slug].home if slug in RULES else "", slug))
    if args.markdown:
        print(page(slugs))
        return 0
    if args.json:
        print_json([_entry(slug) for slug in slugs])
        return 0
    rows = [[slug, severity_of(slug), _target(slug), raised_by(slug), _explained(slug).what] for slug in slugs]
    print(table(["slug", "severity", "target", "raised by", "what should hold"], rows))
    count = f"{len(RULES)} rules, {len(slugs) - len(RULES)} findings of reading and running"
    print(f"\n{count}. `threefold check --explain SLUG` says why, how to confirm and how to fix; {PAGE} has them all.")
    return 0


def page(slugs: list[str]) -> str:
    """All explanations as a page of Markdown."""
    return "\n".join(["# Findings", "", *_INTRODUCTION, *(line for slug in slugs for line in _section(slug))])


_INTRODUCTION = (
    "Every finding that Threefold raises, by its slug. `threefold rules --markdown` writes this page, and",
    "`threefold check --explain SLUG` prints one entry. An error cannot run, a warning is doubtful, and a note says",
    "what the estimate sees and what a change would gain.",
)


def _section(slug: str) -> Iterator[str]:
    said, rule = _explained(slug), RULES.get(slug)
    yield from ("", f"## {slug}", "", f"{severity_of(slug)}, raised by {raised_by(slug)}; target: {_target(slug)}", "")
    points = {"What should hold": said.what, "Why": said.why, "Confirm": said.confirm, "Fix": said.fix}
    if rule and rule.follows:
        points["Follows"] = rule.follows
    if rule and rule.rows:
        points["Rows of docs/coverage.md"] = " ".join(rule.rows)
    for name, text in points.items():
        yield from wrap(
            f"- {name}: {text}", WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
        )


def _entry(slug: str) -> dict[str, object]:
    said, rule = _explained(slug), RULES.get(slug)
    return {
        "rule": slug,
        "severity": severity_of(slug),
        "target": _target(slug),
        "raised_by": raised_by(slug),
        "what": said.what,
        "why": said.why,
        "confirm": said.confirm,
        "fix": said.fix,
        "source": _source(slug),
        "release": _releases(slug),
        "page": f"{PAGE}#{slug}",
        "rows": list(rule.rows) if rule else [],
    }


def _source(slug: str) -> str:
    """Where upstream code or a published figure says so; else our module that judges or raises it."""
    rule = RULES.get(slug)
    return (rule.follows or f"{rule.home.replace('.', '/')}.py") if rule else raised_by(slug)


def _releases(slug: str) -> list[str]:
    """The releases of Megatron Bridge that refuse it, of those that were read."""
    rule = RULES.get(slug)
    place = places().get(slug) if rule and rule.refused_in else None
    return [release.bridge for release in bridge_releases() if place and place.holds_for(release)]


def _target(slug: str) -> str:
    return RULES[slug].target if slug in RULES else "both"


def _explained(slug: str) -> Explanation:
    said = explain(slug)
    assert said is not None
    return said
