"""Run a command in this process, and plan files that are no plans: what tests of the verbs share."""

import pytest

from threefold.cli.main import main

GARBAGE: dict[str, bytes] = {
    "truncated": b'model = "qwen3-30b-a3b"\n[layout\nep = ',
    "types": b'model = 3\n[layout]\nep = "eight"\ntp = 1.5\nstages = 4\n[knobs]\ngraphs = 1\nep_overlap = "yes"\n',
    "keys": b'model = "qwen3-30b-a3b"\nfoo = 1\n[layout]\nepp = 8\n[bar]\nx = 1\n',
    "degrees": b'model = "qwen3-30b-a3b"\n[layout]\nep = -8\ntp = 99999999999999999999\npp = 0\n',
    "encoding": b"model = \xff\xfe\x00\n",
    "nul": b"\x00\x00\x00\x00",
    "empty": b"",
    "blank": b"\n\n  \n",
    "nested": b"a = " + b"[" * 5000 + b"]" * 5000,
    "model": b'model = "no-such-model"\n',
    "hf": b'model = "hf:/no/such/place"\n',
    "stages": b'model = "qwen3-30b-a3b"\n[layout]\npp = 2\nstages = "E(t*9999)*9999L"\n',
    "array": b'model = "qwen3-30b-a3b"\n[[layout]]\nep = 1\n',
    "draft": b'model = "qwen3-30b-a3b"\n[layout]\nep = "auto"\n',
}


def run(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    try:
        code = main(words)
    except SystemExit as stop:  # argparse ends so on a wrong command line
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err
