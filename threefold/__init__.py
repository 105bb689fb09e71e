"""Threefold: plan, check, rehearse, train, profile and retune Mixture-of-Experts models.

    import threefold as tf

    plan = tf.load_plan("plan.toml", {"layout.ep": 16})
    tf.check(plan)
    tf.estimate(plan)

The names load when they are first used, and torch only with what needs it (`rehearse`, `train`). The commands call the
same functions. docs/reference/library.md describes them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from threefold.api.comparisons import compare_runs, contract_of, diagnose_job, profile_run, validate
    from threefold.api.exports import export
    from threefold.api.finetunings import finetune
    from threefold.api.plans import check, estimate, estimate_training, load_plan, sweep, training_curve
    from threefold.api.rehearsals import rehearse
    from threefold.api.reports import make_report
    from threefold.api.searches import find_plan
    from threefold.api.trainings import read_run, train
    from threefold.api.tunings import tune_plan
    from threefold.findings import Finding, FindingsError
    from threefold.lookup.search import find
    from threefold.plan.file import dump_plan
    from threefold.plan.parse import change
    from threefold.plan.plan import Plan

__version__ = "0.2.0"
__all__ = [
    "Finding",
    "FindingsError",
    "Plan",
    "change",
    "check",
    "compare_runs",
    "contract_of",
    "diagnose_job",
    "dump_plan",
    "estimate",
    "estimate_training",
    "export",
    "find",
    "find_plan",
    "finetune",
    "load_plan",
    "make_report",
    "profile_run",
    "read_run",
    "rehearse",
    "sweep",
    "train",
    "training_curve",
    "tune_plan",
    "validate",
]

# Where each name is defined. None is the name of a folder of this package, which it would hide.
_HOMES = {
    "Finding": "threefold.findings",
    "FindingsError": "threefold.findings",
    "Plan": "threefold.plan.plan",
    "change": "threefold.plan.parse",
    "check": "threefold.api.plans",
    "compare_runs": "threefold.api.comparisons",
    "contract_of": "threefold.api.comparisons",
    "diagnose_job": "threefold.api.comparisons",
    "dump_plan": "threefold.plan.file",
    "estimate": "threefold.api.plans",
    "estimate_training": "threefold.api.plans",
    "export": "threefold.api.exports",
    "find": "threefold.lookup.search",
    "finetune": "threefold.api.finetunings",
    "find_plan": "threefold.api.searches",
    "load_plan": "threefold.api.plans",
    "make_report": "threefold.api.reports",
    "profile_run": "threefold.api.comparisons",
    "read_run": "threefold.api.trainings",
    "rehearse": "threefold.api.rehearsals",
    "sweep": "threefold.api.plans",
    "train": "threefold.api.trainings",
    "training_curve": "threefold.api.plans",
    "tune_plan": "threefold.api.tunings",
    "validate": "threefold.api.comparisons",
}


if not TYPE_CHECKING:  # a type checker reads the imports above, and reports names that are not there

    def __getattr__(name: str) -> Any:
        """Load a name of the library when it is first used."""
        if name not in _HOMES:
            raise AttributeError(f"module 'threefold' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
