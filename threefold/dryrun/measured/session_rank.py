"""One rank of a large layout in a measuring session, with rehearsed peers.

`python -m threefold.dryrun.measured.session_rank RANK JOBS RESULTS`, started by `launch/plan_session.py`.
"""

import sys
from pathlib import Path

from threefold.dryrun.measured.rank_steps import time_rank
from threefold.engine.build import device_of
from threefold.engine.tune.session_rank import add_result, in_words, plan_of, read_jobs
from threefold.engine.tune.trial_steps import TrialWindow


def main(rank: str, jobs: str, results: str) -> int:
    for job in read_jobs(Path(jobs)):
        plan = plan_of(job["fields"])
        try:
            found = time_rank(plan, int(rank), device_of(plan), TrialWindow(**job["window"]))
        except Exception as error:
            found = {"error": in_words(error)}
        add_result(Path(results), found)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
