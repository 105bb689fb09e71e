"""The tables of arguments that Megatron-LM prints of exports when it starts: run by Megatron's interpreter.

    python print_tables.py WHEELS FOLDER...

Each folder is an export of `--to megatron-lm`, and gets the file arguments.log. Megatron is imported once, and each
export read by a process of its own, because Megatron keeps its arguments in globals.
"""

import contextlib
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    wheels, *folders = sys.argv[1:]
    judges = [runpy.run_path(f"{folder}/validate.py", run_name="validate") for folder in folders]
    judges[0]["import_megatron"](judges[0]["JOB"], wheels)
    for judge, folder in zip(judges, folders, strict=True):
        if os.fork() == 0:
            try:
                print_table(judge, Path(folder))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.wait()


def print_table(judge: dict[str, Any], folder: Path) -> None:
    from megatron.training import arguments

    job = judge["JOB"]
    export = judge["LmExport"](job, str(folder), 0)
    os.environ.update(judge["exported_variables"](folder / "environment.sh"))
    with judge["simulated_machine"](judge["Device"](**job["device"]), job["gpus_per_node"], job["gpus"], 0):
        export.arguments()
        export.validate()
    with (folder / "arguments.log").open("w") as log, contextlib.redirect_stdout(log):
        arguments._print_args("arguments", export.args)


if __name__ == "__main__":
    main()
