"""`threefold schema`: JSON Schema of plan files and of what verbs print with `--json`, or the page of every field."""

import argparse

from threefold.cli.command_line.out import UsageError, print_json
from threefold.findings import did_you_mean
from threefold.plan.schema import plan_schema
from threefold.report.output_schemas import output_schema, outputs
from threefold.report.plan_fields import PAGE, plan_fields_page

PLAN = "plan-file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    outputs = "an output, such as check or estimate-training; without it the schema of plan files"
    parser.add_argument("output", nargs="?", default=PLAN, help=outputs)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--list", action="store_true", help="the outputs that have a schema, with their versions")
    form.add_argument("--markdown", action="store_true", help=f"the page of every field ({PAGE})")
    form.add_argument("--json", action="store_true", help="the schema, which is what is printed without it too")


def run(args: argparse.Namespace) -> int:
    if args.markdown:
        print(plan_fields_page(), end="")
        return 0
    if args.list:
        print("\n".join(f"{name}: version {output_schema(name)['x-version']}" for name in outputs()))
        return 0
    if args.output != PLAN and args.output not in outputs():
        problem = f"no output {args.output!r} has a schema; {did_you_mean(args.output, [PLAN, *outputs()])}"
        raise UsageError(problem)
    print_json(plan_schema() if args.output == PLAN else output_schema(args.output))
    return 0
