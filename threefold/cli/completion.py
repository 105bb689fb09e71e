"""`threefold completion SHELL`: the script that completes commands in bash, zsh or fish.

At a Tab it runs `threefold completion SHELL --line LINE`, which prints the verbs, flags, plan files, models, chips,
fields and values that may stand at the end of the line.
"""

import argparse
import json
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from threefold.cli.command_line.parser import verb_parser
from threefold.plan.table import FIELDS
from threefold.spec.models import MODELS

_BASH = r"""# threefold completion for bash: eval "$(threefold completion bash)", in ~/.bashrc
_threefold() {
    local line="${COMP_LINE:0:COMP_POINT}" word replies
    mapfile -t replies < <(threefold completion bash --line "$line" 2>/dev/null)
    # Bash splits words at = and : too, and replaces only what is behind the last of them.
    word="${line##*[[:space:]]}"
    local prefix="${word%"${word##*[=:]}"}"
    [[ "$word" == *[=:]* ]] || prefix=""
    COMPREPLY=("${replies[@]#"$prefix"}")
    [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *[=/] ]] && compopt -o nospace
}
complete -o default -F _threefold threefold
"""
_ZSH = r"""#compdef threefold
# threefold completion for zsh: eval "$(threefold completion zsh)", in ~/.zshrc behind compinit
_threefold() {
    local -a replies open done
    local reply
    replies=("${(@f)$(threefold completion zsh --line "${(j: :)words[1,CURRENT]}" 2>/dev/null)}")
    for reply in $replies; do
        [[ "$reply" == *[=/] ]] && open+=("$reply") || done+=("$reply")
    done
    if (( ${#open} + ${#done} )); then
        (( ${#open} )) && compadd -S '' -- $open
        (( ${#done} )) && compadd -- $done
    else
        _files
    fi
}
compdef _threefold threefold
"""
_FISH = r"""# threefold completion for fish: threefold completion fish > ~/.config/fish/completions/threefold.fish
function __threefold_replies
    set -l replies (threefold completion fish --line (commandline --current-process --cut-at-cursor | string collect) 2>/dev/null)
    if test (count $replies) -gt 0
        printf '%s\n' $replies
    else
        __fish_complete_path (commandline --current-token)
    end
end
complete --command threefold --no-files --arguments '(__threefold_replies)'
"""  # noqa: E501
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SCRIPTS, help="the shell that reads the script")
    parser.add_argument("--line", metavar="LINE", help="instead: what may stand at the end of this command line")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    if args.line is None:
        script = SCRIPTS[args.shell]
        print(json.dumps({"shell": args.shell, "script": script}) if args.json else script, end="\n" * args.json)
        return 0
    found = candidates(args.line)
    print(json.dumps(found) if args.json else "\n".join(found), end="\n" if args.json or found else "")
    return 0


_PLAN_POSITIONALS = ("plan", "a", "b", "source")
_PLAN_FLAGS = ("--plan", "--out")
_FIELD_OF_FLAG = {"--model": "model", "--chip": "cluster.chip", "--precision": "knobs.precision"}
_TAKES_FIELD = ("--try", "--over", "--keep")


def candidates(line: str) -> list[str]:
    """Whole words that could take the place of the last one of the line; none where file names may stand there."""
    from threefold.cli.main import VERBS, build_parser  # which imports the module of the verb that runs

    words, current = split_line(line)
    words = words[1:]  # without the program
    verb = next((word for word in words if not word.startswith("-")), None)
    if verb is None:
        return _starting(current, [*VERBS, "--help", "--version"])
    if verb not in VERBS or "--" in words:
        return []
    sub = verb_parser(build_parser(verb), verb)
    behind = words[words.index(verb) + 1 :]
    option = _awaiting_option(sub, behind)
    if option is not None:
        return _values_of_option(option, current)
    if current.startswith("-"):
        return _starting(current, _flags(sub))
    return _positionals(sub, behind, current)


def split_line(line: str) -> tuple[list[str], str]:
    """The finished words of a line, and the unfinished one behind them, which may be empty."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="")
    lexer.whitespace_split, lexer.commenters = True, ""
    words = []
    try:
        words = list(lexer)
    except ValueError:  # a quote that is still open
        words = line.replace("'", " ").replace('"', " ").split()
    if not words or line[-1:].isspace():
        return words, ""
    return words[:-1], words[-1]


def _starting(current: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(current)]


def _flags(sub: argparse.ArgumentParser) -> list[str]:
    shown = (action for action in sub._actions if action.help != argparse.SUPPRESS)
    return sorted(flag for action in shown for flag in action.option_strings if flag.startswith("--"))


def _awaiting_option(sub: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Action | None:
    """The option whose value comes next."""
    action = sub._option_string_actions.get(words[-1]) if words else None
    return action if action is not None and action.nargs != 0 else None


def _values_of_option(option: argparse.Action, current: str) -> list[str]:
    flag = option.option_strings[-1]
    if option.choices is not None:
        return _starting(current, [str(choice) for choice in option.choices])
    if flag == "--explain":
        from threefold.rules.all import known_slugs

        return _starting(current, sorted(known_slugs()))
    if flag in _FIELD_OF_FLAG:
        return _starting(current, _values_of_field(_FIELD_OF_FLAG[flag]))
    if flag in _TAKES_FIELD:
        return _starting(current, FIELDS) if flag == "--keep" else _overrides(current)
    return _plan_files(current) if flag in _PLAN_FLAGS else []


def _positionals(sub: argparse.ArgumentParser, words: Sequence[str], current: str) -> list[str]:
    actions = [action for action in sub._actions if not action.option_strings]
    taken = 0
    for before, word in zip(["", *words], words, strict=False):
        option = sub._option_string_actions.get(before)
        is_value = option is not None and option.nargs != 0
        taken += not (is_value or word.startswith("-") or "=" in word)
    action = actions[min(taken, len(actions) - 1)] if actions else None
    found = _overrides(current) if any(one.dest == "overrides" for one in actions) and taken else []
    if action is None:
        return found
    if action.choices is not None:
        return _starting(current, [str(choice) for choice in action.choices])
    if action.dest == "name":  # of `threefold models`
        return _starting(current, MODELS)
    if action.dest in _PLAN_POSITIONALS:
        return [*_plan_files(current), *found]
    return found


def _overrides(current: str) -> list[str]:
    """Fields as `path=`, and the values that a field can have behind its `=`."""
    path, equals, text = current.partition("=")
    if not equals:
        return [f"{field}=" for field in FIELDS if field.startswith(current)]
    if path not in FIELDS:
        return []
    before, comma, last = text.rpartition(",") if list in FIELDS[path].types else ("", "", text)
    taken = before.split(",")
    return [f"{path}={before}{comma}{value}" for value in _starting(last, _values_of_field(path)) if value not in taken]


def _values_of_field(path: str) -> list[str]:
    field = FIELDS[path]
    if path == "model":
        return list(MODELS)
    return ["true", "false"] if bool in field.types else list(field.choices)


def _plan_files(current: str) -> list[str]:
    """TOML files and folders below the folder of the unfinished path, and all recipes where nothing is typed yet."""
    head, _, name = current.rpartition("/")
    folder = Path(f"{head}/" if "/" in current else ".").expanduser()
    found = []
    try:
        for entry in os.scandir(folder):
            if entry.name.startswith(name) and (name or not entry.name.startswith(".")):
                path = f"{head}/{entry.name}" if "/" in current else entry.name
                found += [f"{path}/"] if entry.is_dir() else [path] if entry.name.endswith(".toml") else []
    except OSError:
        return []
    recipes = [] if current else [f"recipes/{path.name}" for path in Path("recipes").glob("*.toml")]
    return sorted([*found, *recipes])
