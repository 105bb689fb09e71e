"""`threefold schema`: JSON Schema for editors, or the page that lists every field."""

import argparse
import json
import sys

from threefold.plan.schema import plan_schema
from threefold.report.pages.plan_fields import PAGE, plan_fields_page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help=f"the page of every field ({PAGE})")
    form.add_argument("--json", action="store_true", help="the schema, which is what is printed without it too")


def run(args: argparse.Namespace) -> int:
    if args.markdown:
        print(plan_fields_page(), end="")
        return 0
    json.dump(plan_schema(), sys.stdout, indent=2)
    print()
    return 0
