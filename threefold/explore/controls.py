"""The page of the explorer: controls for the fields of a plan, and places that answers fill.

Controls are made from the declarations of the fields (`plan/table.py`), so that a new knob appears by itself. An empty
control means the default. `explore.js` reads them, asks the server and puts the answer's markup into its places.
"""

from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from threefold.explore.request import EXPLORED, Started
from threefold.fields import Field
from threefold.plan.table import FIELDS
from threefold.report.html.markup import Markup, join, tag
from threefold.report.html.page import Section, page
from threefold.spec.models import MODELS

QUESTION = (
    "model", "cluster.chip", "cluster.gpus", "job.seq_len", "job.global_batch", "job.micro_batch", "target",
)  # fmt: skip
DEGREES = ("layout.tp", "layout.cp", "layout.pp", "layout.vpp", "layout.ep", "layout.etp", "layout.schedule")
KNOBS = (
    "knobs.precision", "knobs.dispatcher", "knobs.recompute", "knobs.ep_overlap", "knobs.delay_wgrad",
    "knobs.data_parallel", "knobs.optimizer_offload", "knobs.graphs",
)  # fmt: skip
START: dict[str, Any] = {
    "model": "qwen3-30b-a3b",
    "target": "threefold",
    "cluster.chip": "h100",
    "cluster.gpus": 32,
    "job.seq_len": 4096,
    "job.global_batch": 512,
    "layout.pp": 2,
    "layout.vpp": 4,
    "layout.ep": 8,
    "knobs.recompute": ["layernorm", "moe_act"],
}
_DOUBLING = frozenset(("cluster.gpus", "job.seq_len", "job.global_batch", "job.micro_batch", *DEGREES[:-1]))
_PLACES = (
    ("layouts", "Feasible layouts"),
    ("findings", "Findings"),
    ("layout", "Layout"),
    ("memory", "Memory"),
    ("time", "Time"),
    ("pipeline", "Pipeline"),
    ("plan", "Plan to copy"),
)


@cache
def _script() -> str:
    return files("threefold.explore").joinpath("explore.js").read_text(encoding="utf-8")


def explorer_page(started: Started) -> str:
    """The whole page, with the controls at what the command line brought."""
    head = join(
        [
            tag("h1", "Explore a plan"),
            tag("p", tag("span", "", id="line"), class_="subtitle", aria_live="polite"),
            tag("p", "", id="trouble", role="alert", hidden=True),
        ]
    )
    places = [Section("answer", "", tag("div", _form(started), tag("div", *_places(), id="places"), class_="explorer"))]
    return page("threefold explore", head, places, _script(), connect="'self'", class_="wide-page")


def _places() -> Iterator[Markup]:
    yield tag("div", id="tiles")
    for name, title in _PLACES:
        body = [tag("div", id=f"at-{name}")]
        if name == "findings":
            body.append(tag("button", "Try fixes", type="button", id="try"))
        yield tag("section", tag("h2", title), *body, id=name)


def _form(started: Started) -> Markup:
    values = started.fields or START
    rest = [path for path in FIELDS if path in EXPLORED and path not in (*QUESTION, *DEGREES, *KNOBS)]
    more_knobs = [path for path in rest if path.startswith(("knobs.", "layout."))]
    more = [path for path in rest if path.startswith(("job.", "cluster."))]
    groups = [
        _group("Model, machine, job", QUESTION, values, started),
        _group("Degrees", DEGREES, values, started),
        _group("Knobs", KNOBS, values, started),
        tag("details", tag("summary", "More knobs"), _group("", more_knobs, values, started)),
        tag("details", tag("summary", "More of the job and the cluster"), _group("", more, values, started)),
    ]
    return tag("form", *groups, id="controls", aria_label="Fields of the plan")


def _group(title: str, paths: Any, values: dict[str, Any], started: Started) -> Markup:
    controls = [_control(FIELDS[path], values.get(path), started) for path in paths]
    legend = [tag("legend", title)] if title else []
    return tag("fieldset", *legend, *controls)


def _control(field: Field, value: Any, started: Started) -> Markup:
    name = field.path.rpartition(".")[2].replace("_", " ")
    if list in field.types and field.choices and str not in field.types:
        return _checks(field, name, value)
    if bool in field.types:
        now = field.default if value is None else value
        box = tag("input", type="checkbox", name=field.path, checked=bool(now), data_default=str(field.default).lower())
        return tag("label", box, tag("span", name), class_="check", title=field.doc)
    ident = f"f-{field.path.replace('.', '-')}"
    choices = _choices(field, started)
    if choices:
        shown = value if isinstance(value, str) else None
        body = _select(field, ident, choices, shown)
    else:
        default = "" if field.default is None else str(field.default)
        body = tag(
            "input", type="text", inputmode="numeric", id=ident, name=field.path, placeholder=default or "default",
            value="" if value is None else str(value), autocomplete="off", spellcheck="false",
        )  # fmt: skip
    if field.path in _DOUBLING:
        half = tag("button", "÷2", type="button", data_step="half", tabindex=-1, aria_label=f"halve {name}")
        twice = tag("button", "x2", type="button", data_step="double", tabindex=-1, aria_label=f"double {name}")
        body = tag("span", half, body, twice, class_="stepper")
    return tag("div", tag("label", name, for_=ident, title=field.doc), body, class_="field")


def _choices(field: Field, started: Started) -> list[str]:
    own = started.fields.get(field.path)
    if field.path == "model":
        return [*([own] if isinstance(own, str) and own not in MODELS else []), *MODELS]
    found = list(field.choices)
    return [own, *found] if field.path == "cluster.chip" and isinstance(own, str) and own not in found else found


def _select(field: Field, ident: str, choices: list[str], value: str | None) -> Markup:
    options = []
    if field.path not in ("model", "cluster.chip", "target"):
        default = f"default ({field.default})" if isinstance(field.default, str) else "default"
        options.append(tag("option", default, value="", selected=value is None))
    options += [tag("option", choice, value=choice, selected=choice == value) for choice in choices]
    return tag("select", *options, id=ident, name=field.path)


def _checks(field: Field, name: str, value: Any) -> Markup:
    """One box for each name of a list."""
    usual = field.default or ()
    chosen = value if isinstance(value, list | tuple) else usual
    boxes = []
    for choice in field.choices:
        box = tag(
            "input", type="checkbox", name=field.path, value=choice, checked=choice in chosen, data_list=True,
            data_default=str(choice in usual).lower(),
        )  # fmt: skip
        boxes.append(tag("label", box, tag("span", choice), class_="check"))
    return tag("div", tag("span", name, class_="listname", title=field.doc), *boxes, class_="list", role="group")
