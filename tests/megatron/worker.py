"""Megatron imported once, judging one export a line: run by Megatron's interpreter for the tests next to it.

    python worker.py VALIDATE.py WHEELS

Standard input: a line of JSON with the `job` and the `folder` of an export, and `ranks` where it is not the first and
the last that are judged. Standard output: the verdict.
"""

import json
import os
import runpy
import sys

SECONDS, GIGABYTES = 120.0, 16.0  # of a rank


def main() -> None:
    script, wheels = sys.argv[1:3]
    answers = os.fdopen(os.dup(1), "w")  # Megatron prints on the standard output
    os.dup2(2, 1)
    judge = runpy.run_path(script, run_name="validate")
    finder, versions = judge["import_megatron"](judge["JOB"], wheels)
    for line in sys.stdin:
        asked = json.loads(line)
        ranks = judge["judge_export"](asked["job"], asked["folder"], finder, SECONDS, GIGABYTES, asked["ranks"])
        answers.write(json.dumps(judge["summary"](asked["job"], ranks, versions)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
