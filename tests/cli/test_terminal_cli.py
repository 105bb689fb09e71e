"""What a terminal gets and a pipe does not: colors, and a line that says that a command is at work."""

import io
import os
import pty
import subprocess
import sys

import pytest
from repository import ROOT

from threefold.cli.command_line.out import QUIET_SECONDS, Out, WorkingLine, colored, uses_color
from threefold.cli.main import SHOWN_AT_WORK, VERBS

WORDS = ["check", "recipes/deepseek-v3-128k-256xh100-fp8.toml", "layout.ep=48"]


def on_a_terminal(**changes: str) -> str:
    """What `check` writes to a terminal."""
    leader, follower = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    command = [sys.executable, "-m", "threefold", *WORDS]
    environment = {**kept, "TERM": "xterm", **changes}
    process = subprocess.Popen(command, stdout=follower, stderr=follower, cwd=ROOT, env=environment)
    os.close(follower)
    said = b""
    while True:
        try:
            piece = os.read(leader, 4096)
        except OSError:  # how Linux says that nobody writes any more
            break
        if not piece:
            break
        said += piece
    os.close(leader)
    assert process.wait(timeout=600) == 1
    return said.decode()


def test_findings_have_colors_on_a_terminal_only() -> None:
    assert "\x1b[1;31merror\x1b[0m[ep-divides-experts]" in on_a_terminal()
    assert "\x1b[1;31m" not in on_a_terminal(NO_COLOR="1")
    assert "\x1b" not in on_a_terminal(TERM="dumb")
    done = subprocess.run(
        [sys.executable, "-m", "threefold", *WORDS], capture_output=True, text=True, cwd=ROOT, timeout=600
    )
    assert "\x1b" not in done.stdout + done.stderr
    assert "error[ep-divides-experts]" in done.stdout


def test_only_heads_of_findings_are_colored() -> None:
    text = "error[a-b] x: y\n  fix: layout.ep=1\nan error[a] inside\n"
    assert colored(text) == "\x1b[1;31merror\x1b[0m[a-b] x: y\n  \x1b[32mfix:\x1b[0m layout.ep=1\nan error[a] inside\n"
    assert colored("nothing here\n") == "nothing here\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_no_color_counts_only_where_it_is_not_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "")
    assert uses_color(Terminal())
    assert not uses_color(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not uses_color(Terminal())


def test_the_working_line_comes_late_and_goes_before_output() -> None:
    terminal = Terminal()
    line = WorkingLine("sweep", terminal)
    line.show()
    assert terminal.getvalue() == ""  # two seconds are not over
    line.last_output -= QUIET_SECONDS + 1
    line.show()
    assert terminal.getvalue().endswith("threefold sweep: working, 0 s")
    out = Out(terminal, must_arrive=True)
    out.before_write = line.erase
    out.write("answer")
    assert terminal.getvalue().endswith("\r\x1b[Kanswer")
    line.show()
    assert terminal.getvalue().endswith("answer")  # something was printed just now
    line.ended.set()
    line.last_output -= QUIET_SECONDS + 1
    line.show()
    assert terminal.getvalue().endswith("answer")


def test_verbs_shown_at_work_exist() -> None:
    assert set(SHOWN_AT_WORK) <= {*VERBS, "report"}
