"""Every field of a plan file by its dotted path: the one list that parsing, schema and help read."""

from typing import Any

from threefold.fields import MAX_INT, MAX_LAYERS, Field, fields_of
from threefold.layout.degrees import Layout
from threefold.plan.plan import Cluster, Job, Knobs, Run, Stack
from threefold.spec.stacks import TARGETS

TABLES: dict[str, type] = {"cluster": Cluster, "job": Job, "layout": Layout, "knobs": Knobs, "run": Run, "stack": Stack}
AUTO = "auto"


def _top(path: str, doc: str, default: Any = None, choices: tuple[str, ...] = ()) -> Field:
    return Field(path, (str,), False, default, doc, None, None, choices)


def _cut(path: str, doc: str, at_least: int = 1, at_most: int = MAX_INT) -> Field:
    return Field(path, (int,), True, None, doc, at_least, at_most, ())


FIELDS: dict[str, Field] = {
    "model": _top("model", "a model name, or hf:path of a Hugging Face config.json"),
    "model.num_layers": _cut("model.num_layers", "cut the model to this many layers", at_most=MAX_LAYERS),
    "model.num_dense_layers": _cut("model.num_dense_layers", "of which so many first ones are dense", at_least=0),
    "model.num_experts": _cut("model.num_experts", "cut the model to this many routed experts"),
    "model.vocab": _cut("model.vocab", "another vocabulary size"),
    "target": _top("target", "the stack that runs the plan", default="threefold", choices=TARGETS),
    **{path: f for table, kind in TABLES.items() for path, f in fields_of(kind, table).items()},
}

# A draft may leave these to the search; what is trained and on what stays the user's word.
FREE = frozenset(
    path
    for path in FIELDS
    if path.startswith(("layout.", "knobs.")) or path in ("job.global_batch", "job.micro_batch", "cluster.gpus")
)

# Fields of names that also take `file:PATH`, with what such a file is.
FILE_FIELDS = {"cluster.chip": "a chip file of your own", "job.load": "loads that a run recorded"}
