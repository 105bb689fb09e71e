"""`threefold completion SHELL`: the script that completes commands in bash, zsh or fish."""

import argparse
import json

from threefold.cli.command_line.candidates import candidates

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
