"""`threefold mcp`: serve the verbs to assistants over standard input and output (Model Context Protocol)."""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from threefold.cli.command_line.inputs import print_findings
from threefold.cli.command_line.out import UsageError
from threefold.findings import Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder",
        type=Path,
        action="append",
        metavar="DIR",
        help="whose plans, runs and logs may be read; may be given several times (default: the current folder)",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable findings")


def run(args: argparse.Namespace) -> int:
    folders = args.folder or [Path()]
    missing = next((folder for folder in folders if not folder.is_dir()), None)
    if missing is not None:
        raise UsageError(f"{missing} is no folder")
    if find_spec("mcp") is None:
        advice = "pip install 'threefold[mcp]'"
        found = Finding(rule="mcp-installed", at="mcp", problem="the package is not here", advice=advice)
        return print_findings([found], args.json, sys.stderr)
    from threefold.mcp.server import build_server

    build_server(folders).run()
    return 0
