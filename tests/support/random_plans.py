"""Hypothesis strategies that draw plans: fields at random, and whole plans of MoE models."""

from typing import Any

from hypothesis import strategies as st
from plans import build

from threefold.plan.plan import CP_COMM, CP_EXCHANGE, RECOMPUTE_MODULES, Plan
from threefold.plan.table import FIELDS
from threefold.spec.models import MODELS

# Values for random plans: mostly legal on their own, rarely together.
_SMALL = st.sampled_from([1, 1, 1, 2, 3, 4, 5, 7, 8, 16, 32, 48, 64, 100, 1024])


def _value(path: str) -> st.SearchStrategy[Any]:
    field = FIELDS[path]
    if path == "layout.stages":
        return st.sampled_from(["Et|(tt|)*30mL", "Et*4|(t*4|)*14tmL", "EL", "E|t|L|"])
    if path == "knobs.cp_comm":
        return st.one_of(st.sampled_from(field.choices), st.just(["p2p", "a2a"]))
    if path == "job.freeze":
        names = ["vision", "projector", "language", "layers.0.*", "*.experts.*", "emb"]
        return st.lists(st.sampled_from(names), max_size=2, unique=True)
    if list in field.types and field.choices:
        return st.lists(st.sampled_from(field.choices), max_size=3, unique=True)
    if field.choices:
        return st.sampled_from(field.choices)
    if bool in field.types:
        return st.booleans()
    if path == "job.seq_len":
        return st.sampled_from([1, 17, 512, 4096, 8192, 32768, 100_000, 131_072, 1_048_576])
    if path == "cluster.gpus":
        return st.sampled_from([1, 2, 7, 8, 16, 64, 96, 256, 1000, 1024, 16384])
    if path == "model.num_layers":
        return st.integers(1, 130)
    if path == "model.num_experts":
        return st.sampled_from([1, 2, 8, 12, 64, 256])
    if path in ("model.num_dense_layers", "model.vocab"):
        return st.integers(1, 5)
    if path.startswith("stack."):
        return st.sampled_from(["2.5.1", "2.7", "2.12.0", "nightly"])
    if path in ("run.wandb", "run.cores"):
        return st.just("0")
    if path == "job.data":
        return st.sampled_from(["synthetic", "embedded"])
    if path in ("job.tokenizer", "job.val_data"):
        return st.sampled_from(["no/such.json", "embedded"])
    if field.types == (str,):
        return st.just("text")
    if float in field.types:
        low, high = (0.0 if field.at_least is None else field.at_least), field.at_most
        return st.sampled_from([x for x in (0.5, 1.0) if low <= x and (high is None or x <= high)])
    if path == "knobs.dispatch_sms" or path == "knobs.max_connections":
        return st.integers(1, 32)
    if path in ("job.mtp", "knobs.activation_offload_layers", "run.image_workers"):
        return st.integers(0, 3)
    return _SMALL


@st.composite
def random_fields(draw: st.DrawFn) -> dict[str, Any]:
    """A model and up to 14 other fields of a plan, whether they go together or not."""
    paths = [path for path in FIELDS if path != "model"]
    chosen = draw(st.lists(st.sampled_from(paths), max_size=14, unique=True))
    model = draw(st.sampled_from(sorted(MODELS)))
    cut = [path for path in chosen if path != "model.num_experts" or MODELS[model].is_moe]
    return {"model": model, **{path: draw(_value(path)) for path in cut}}


_SMALL_MOE = ("qwen3-30b-a3b", "deepseek-v3", "qwen3-next-80b-a3b", "gpt-oss-20b", "nemotron-3-nano")
_RECOMPUTED = st.sets(st.sampled_from(RECOMPUTE_MODULES[:-1]), max_size=4)


@st.composite
def moe_plans(draw: st.DrawFn) -> Plan:
    """Plans of MoE models whose grids fill as many GPUs as they need, or twice that: CP 1 to 64, 4K to 512K tokens."""
    tp, ep = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 4, 8, 16]))
    cp = draw(st.sampled_from([1, 1, 1, 2, 4, 8, 16, 32, 64]))
    pp, vpp = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)]))
    fields: dict[str, Any] = {
        "model": draw(st.sampled_from(_SMALL_MOE)),
        "target": draw(st.sampled_from(["megatron-bridge", "threefold"])),
        "cluster.chip": draw(st.sampled_from(["h100", "gb200"])),
        "cluster.gpus": pp * max(tp * cp, ep) * draw(st.sampled_from([1, 2])),
        "job.seq_len": draw(st.sampled_from([4096 * 2**n for n in range(8)])),
        "job.global_batch": 64,
        "layout.tp": tp,
        "layout.cp": cp,
        "layout.ep": ep,
        "layout.pp": pp,
        "layout.vpp": vpp,
        "knobs.precision": draw(st.sampled_from(["bf16", "fp8-cs"])),
        "knobs.recompute": sorted(draw(_RECOMPUTED)),
        "knobs.cp_comm": draw(st.sampled_from(CP_COMM)),
        "knobs.cp_exchange": draw(st.sampled_from([None, *CP_EXCHANGE])),
    }
    return build(fields)
