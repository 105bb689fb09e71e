"""`threefold find WORDS`: one search over rules, fields, settings, commands, pages, words, recipes and runs."""

import argparse
import shutil
import sys
from typing import Any

from threefold.cli.command_line.out import UsageError, print_json
from threefold.lookup.entries import KINDS, Entry
from threefold.lookup.names import (
    SYSTEMS,
    Setting,
    bare,
    matches,
    near,
    notes,
    plan_field,
    releases,
    rules_about,
    span,
    variables,
)
from threefold.lookup.runs import matched_pairs
from threefold.lookup.search import find

MOST = 100
_PIPED = 400  # letters of a line where no terminal is read from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="WORD", help="what to look for, in any system's words")
    parser.add_argument("--kind", choices=KINDS, help="only these; with one name, `name` tells all about that setting")
    parser.add_argument("--ab", action="store_true", help="published runs that differ in one setting, side by side")
    parser.add_argument("--most", type=int, default=8, metavar="N", help="entries to print (default 8)")
    parser.add_argument("--full", action="store_true", help="print the text of each entry, as its page has it")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    if (not args.words and not args.ab) or not 1 <= args.most <= MOST:
        raise UsageError(f"give words to look for, and --most from 1 to {MOST}")
    query = " ".join(args.words)
    if args.ab:
        return _print(matched_pairs([word.lower() for word in args.words]), args.json, _pairs_text)
    if args.kind == "name" and len(args.words) == 1:
        return _print(describe(query), args.json, _setting_text)
    entries = find(query, args.kind, args.most)
    told = [entry.to_json() | ({"text": entry.text.strip()} if args.full else {}) for entry in entries]
    return _print(told, args.json, lambda _: _entries_text(entries, query, args.full))


def _print(answer: Any, as_json: bool, text: Any) -> int:
    if as_json:
        print_json(answer)
    else:
        print(text(answer))
    return 0


def describe(name: str) -> dict[str, Any]:
    """All that is known of a setting: where it is declared, its field in a plan, and the rules that judge it."""
    found, field = matches(name), plan_field(name)
    return {
        "name": name,
        "known": bool(found) or name in variables(),
        "variable": variables().get(name, ""),
        "declared": [setting.to_json() | {"span": span(setting)} for setting in found],
        "plan_field": field,
        "rules": rules_about(name, field) if found or field else {},
        "notes": list(notes().get(bare(name), ())),
        "near": [] if found or name in variables() else near(name),
        "read": {system: list(ends) for system, ends in releases().items()},
    }


def _entries_text(entries: list[Entry], query: str, full: bool) -> str:
    if not entries:
        return f"nothing about {query!r}: try other words, or `threefold find NAME --kind name` for a setting"
    width = max(60, shutil.get_terminal_size().columns) if sys.stdout.isatty() else _PIPED
    lines = []
    for entry in entries:
        lines += [_cut(f"{entry.kind:8}{entry.name}", width), _cut(f"        {entry.answer}", width)]
        lines.append(_cut(f"        -> {entry.read_on}", width))
        lines += ["", entry.text.strip(), ""] if full and entry.text.strip() else []
    return "\n".join(lines)


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 3].rstrip()}..."


def _setting_text(answer: dict[str, Any]) -> str:
    read = ", ".join(f"{SYSTEMS[system]} {first} to {last}" for system, (first, last) in answer["read"].items())
    lines = [answer["name"] if answer["known"] else f"{answer['name']}: unknown in these releases ({read})"]
    if answer["variable"]:
        return f"{lines[0]}\n  environment variable, which an export sets to {answer['variable']}"
    for item in answer["declared"]:
        setting = Setting(**{key: value for key, value in item.items() if key != "span"})
        default = f", default {setting.default}" if setting.default else ""
        lines += [
            f"  {SYSTEMS[setting.system]} {setting.holder}: {setting.type}{default}",
            f"    {setting.file}, {item['span']}",
        ]
    if answer["near"]:
        lines.append(f"  near: {', '.join(answer['near'])}")
    if answer["plan_field"]:
        lines.append(f"  in a plan: {answer['plan_field']}")
    elif answer["known"]:
        lines.append(
            "  no field of a plan sets it: Threefold does not model it, and an export leaves it as the recipe has it"
        )
    lines += [f"  {note}" for note in answer["notes"]]
    if answer["rules"]:
        lines += ["  judged by", *(f"    {slug}: {holds}" for slug, holds in answer["rules"].items())]
    return "\n".join(lines)


def _pairs_text(groups: list[dict[str, Any]]) -> str:
    if not groups:
        return "no published A/B has all of these words: `threefold find --ab` lists every one"
    lines = []
    for group in groups:
        lines.append(f"{group['variable']}  ({group['group']})")
        for item in group["runs"]:
            ratio = f"{item['of_first']:.3f} x" if item["of_first"] else ""
            lines.append(f"  {item['speed']:>16} {ratio:>8}  {item['shape']}; {item['settings']}")
            many = "" if len(item["differs"]) <= 1 else ": no single one explains the speed"
            said = [f"differs in {', '.join(item['differs'])}{many}"] if item["differs"] else []
            lines += [
                f"{'':27}  {part}" for part in (*said, f"{item['status']}; {item['source']}", item["notes"]) if part
            ]
    return "\n".join(lines)
