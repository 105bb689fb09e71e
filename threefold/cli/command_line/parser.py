"""The argument parser of a verb: argparse's, with the nearest known name behind a word that it does not know."""

import argparse
import re
from typing import Any, NoReturn

from threefold.findings import nearest

_INVALID_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)$")


class Parser(argparse.ArgumentParser):
    """Ends with code 2, one line about what is wrong, and one about what was meant."""

    def error(self, message: str) -> NoReturn:
        found = _INVALID_CHOICE.search(message)
        if found:
            known = [word.strip(" '") for word in found[2].split(",")]
            message += said(found[1], known)
        super().error(message)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """The value of an argument. Python before 3.13 takes `--flag=--` for no value at all, an empty list."""
        if action.option_strings and action.nargs is None and arg_strings == ["--"]:
            raise argparse.ArgumentError(action, "expected one argument")
        return super()._get_values(action, arg_strings)

    def refuse_words(self, words: list[str]) -> NoReturn:
        """Refuse words that nothing takes, with the flag that each may have meant."""
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        meant = "".join(said(word.partition("=")[0], flags) for word in words if word.startswith("--"))
        self.error(f"unrecognized arguments: {' '.join(words)}{meant}")


def said(word: str, known: list[str]) -> str:
    close = nearest(word, known)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def verb_parser(parser: Parser, verb: str) -> Parser:
    """The parser of one verb."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found: Parser = action.choices[verb]
            return found
    raise KeyError(verb)
