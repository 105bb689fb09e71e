"""`threefold rules`: the registry."""

import argparse
import json
import sys

from threefold.report.terminal import table
from threefold.rules.all import RULES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    rules = sorted(RULES.values(), key=lambda rule: (rule.home, rule.slug))
    if args.json:
        listing = [
            {
                "rule": rule.slug,
                "severity": rule.severity,
                "target": rule.target,
                "what": rule.explanation.what,
                "rows": list(rule.rows),
            }
            for rule in rules
        ]
        json.dump(listing, sys.stdout, indent=2)
        print()
        return 0
    rows = [[rule.slug, rule.severity, rule.target, rule.explanation.what] for rule in rules]
    print(table(["rule", "severity", "target", "what it holds"], rows))
    print(f"\n{len(rules)} rules. `threefold check --explain RULE` says why, how to confirm and how to fix.")
    return 0
