"""The page of every command and flag, made from the parsers: `python -m threefold.cli.command_line.reference > PAGE`.

`flags_by_verb` is also what the test of consistent flags reads.
"""

import argparse
from collections.abc import Iterator
from textwrap import fill

from threefold.cli.command_line.bounds import bounds_of
from threefold.cli.command_line.parser import verb_parser
from threefold.cli.main import VERBS, build_parser

PAGE = "docs/reference/commands.md"
_HEAD = f"""# Reference: commands

Every verb with its bounds, arguments and flags, and which verbs share a flag. The page is made from the parsers:
`python -m threefold.cli.command_line.reference > {PAGE}`.

Wherever a plan is taken, `path=value` overrides a field of it ([plan-file.md](plan-file.md)). `--json` prints one JSON
value to standard output, also for findings. Lengths may be written `32K`, tokens `1.5T`, times `90s`, `8m` or `1h`.
Exit codes: 0 clean or warnings only, 1 errors in the plan or in a file, 2 a wrong command line. Colors and progress go
to terminals only, and `NO_COLOR` turns colors off.
"""


def flags_by_verb() -> dict[str, dict[str, argparse.Action]]:
    """The visible flags of every verb, by name."""
    parser = build_parser(*VERBS)
    found = {}
    for verb in VERBS:
        actions = verb_parser(parser, verb)._actions
        found[verb] = {
            flag: action
            for action in actions
            for flag in action.option_strings
            if flag.startswith("--") and flag != "--help" and action.help != argparse.SUPPRESS
        }
    return found


def commands_page() -> str:
    return "\n".join([_HEAD, *_shared_flags(), "", *_verbs()])


def _shared_flags() -> Iterator[str]:
    """Flags that several verbs take."""
    by_verb = flags_by_verb()
    verbs_of: dict[str, list[str]] = {}
    for verb, flags in by_verb.items():
        for flag in flags:
            verbs_of.setdefault(flag, []).append(verb)
    yield from ("## Flags of several verbs", "", "| flag | verbs |", "|---|---|")
    for flag, verbs in sorted(verbs_of.items()):
        if len(verbs) > 1:
            names = "all verbs" if len(verbs) == len(by_verb) else ", ".join(f"`{verb}`" for verb in verbs)
            yield f"| `{flag}` | {names} |"


def _verbs() -> Iterator[str]:
    parser = build_parser(*VERBS)
    for verb, doc in VERBS.items():
        text = fill(f"{doc[0].upper()}{doc[1:]}. {bounds_of(verb)}", 120, break_on_hyphens=False)
        yield from (f"## {verb}", "", text, "", "| argument | what it is |", "|---|---|")
        for action in verb_parser(parser, verb)._actions:
            if action.help != argparse.SUPPRESS and action.dest != "help":
                yield f"| `{_name(action)}` | {_help(action)} |"
        yield ""


def _name(action: argparse.Action) -> str:
    """The flag with its value, or the positional argument with brackets where it may be left out."""
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    text = str(value).replace("|", "\\|")
    if action.option_strings:
        return action.option_strings[-1] if action.nargs == 0 else f"{action.option_strings[-1]} {text}"
    many = " ..." if action.nargs in ("*", "+") else ""
    return f"[{text}{many}]" if action.nargs in ("*", "?") else f"{text}{many}"


def _help(action: argparse.Action) -> str:
    return str(action.help or "").replace("|", "\\|").replace("%%", "%")


if __name__ == "__main__":
    print(commands_page(), end="")
