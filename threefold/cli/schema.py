"""`threefold schema`: JSON Schema for editors."""

import argparse
import json
import sys

from threefold.plan.schema import plan_schema


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def run(args: argparse.Namespace) -> int:
    json.dump(plan_schema(), sys.stdout, indent=2)
    print()
    return 0
