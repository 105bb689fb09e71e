"""`threefold explore`: a page on this machine that shows how a plan changes with its degrees and knobs."""

import argparse
import json
import sys
import webbrowser

from threefold.api.plans import open_plan, with_choices
from threefold.cli.command_line.inputs import add_json, print_findings
from threefold.cli.command_line.out import end_on_sigterm
from threefold.explore.request import Started
from threefold.explore.server import ExplorerServer
from threefold.rules.all import errors

DEFAULT_PORT = 8723


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", nargs="?", help="a plan file to begin with (TOML)")
    parser.add_argument("overrides", nargs="*", metavar="path=value", help="fields to override, such as layout.ep=16")
    parser.add_argument(
        "--port", type=_port, default=DEFAULT_PORT, metavar="N", help=f"where to serve (default {DEFAULT_PORT}; 0: any)"
    )
    parser.add_argument("--no-browser", action="store_true", help="print the address, and open no browser")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    started = Started({})
    if args.plan is not None:
        parsed, findings = with_choices(*open_plan(args.plan, args.overrides))
        if parsed.plan is None or errors(findings):
            return print_findings(findings, args.json)
        started = Started.of_plan(parsed.plan)
    server = ExplorerServer(args.port, started)
    try:
        with end_on_sigterm():
            said = f"{server.address}  (this machine only; Ctrl-C ends it)"
            print(json.dumps({"address": server.address}) if args.json else said, flush=True)
            if not args.no_browser:
                webbrowser.open(server.address)
            server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        print("\nended", file=sys.stderr)
    finally:
        server.close()
    return 0


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 <= int(text) <= 65_535:
        raise argparse.ArgumentTypeError(f"{text} is no port: 0 to 65535")
    return int(text)
