"""Plan files: what is read back, what is refused, and that nothing but findings ever comes of it."""

import datetime
import json
import os
import random
import re
import shlex
import string
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hf_configs import CONFIGS
from hypothesis import given
from hypothesis import strategies as st

from threefold import toml_file
from threefold.fields import Field
from threefold.findings import FindingsError, as_override
from threefold.layout.stages import format_stages
from threefold.plan.file import dump_fields, dump_plan, parse_overrides, read_plan
from threefold.plan.parse import Parsed, change, free_findings, normalize, parse
from threefold.plan.plan import Plan
from threefold.plan.schema import plan_schema
from threefold.plan.table import AUTO, FIELDS, FREE
from threefold.plan.words import OTHERWISE, SAME
from threefold.rules.all import raised_by
from threefold.spec.models import MODELS

# Section 5 of the design.
EXAMPLE = """
model = "deepseek-v3"                      # a name, or "hf:path/to/config.json"
target = "threefold"                       # or "megatron-bridge"
cluster = { chip = "h100", gpus = 256 }

[job]
seq_len = 131_072
global_batch = 128
micro_batch = 1
task = "pretrain"

[layout]
pp = 8
vpp = 4
cp = 32
ep = 32                                    # dp = 1 and edp = 1 follow; they are never written

[knobs]
precision = "fp8-blockwise"
dispatcher = "deepep"
recompute = ["mla_up_proj", "layernorm", "moe", "mlp"]
optimizer_offload = 1.0
"""
QWEN = {"model": "qwen3-30b-a3b"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan file to overwrite: shared by the examples of a property."""
    return tmp_path_factory.mktemp("plan") / "plan.toml"


def read(path: Path, content: str | bytes, overrides: Sequence[str] = ()) -> Parsed:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_plan(str(path), overrides)


def plan_of(raw: dict[str, Any], overrides: dict[str, Any] | None = None) -> Plan:
    parsed = parse(raw, overrides)
    assert parsed.plan, parsed.findings
    return parsed.plan


def rules_of(parsed: Parsed) -> list[tuple[str, str]]:
    return [(finding.rule, finding.at) for finding in parsed.findings]


def assert_refused(parsed: Parsed) -> None:
    """No plan, at least one error, each of a known rule and with a way out."""
    assert parsed.plan is None
    assert any(finding.severity == "error" for finding in parsed.findings)
    for finding in parsed.findings:
        assert raised_by(finding.rule) == "reading a plan"
        assert finding.at
        assert finding.fix_text
        assert str(finding)


def test_the_example_of_the_design(path: Path) -> None:
    parsed = read(path, EXAMPLE)
    assert not parsed.findings
    assert not parsed.free
    plan = parsed.plan
    assert plan
    assert (plan.model, plan.target, plan.chip.name) == (MODELS["deepseek-v3"], "threefold", "h100")
    assert (plan.layout.dp, plan.layout.edp, plan.layout.gpus) == (1, 1, 256)
    assert plan.knobs.recompute == ("mla_up_proj", "layernorm", "moe", "mlp")
    assert (plan.knobs.optimizer_offload, plan.job.routing, plan.mtp) == (1.0, "learned", 1)
    # By hand: 128 sequences on one data-parallel rank, one at a time; 2^7 x 2^17 tokens.
    assert (plan.num_microbatches, plan.tokens_per_step) == (128, 2**24)
    assert format_stages(plan.chunks) == "Et|(tt|)*30mL"
    assert plan.is_long
    assert plan.low_precision
    assert not plan.is_vlm
    assert not plan.full_recompute
    assert (plan.link("ep").link, plan.link("ep").in_domain) == ("network", 8)


def test_every_field_is_documented() -> None:
    assert all(field.doc and field.types for field in FIELDS.values())
    defaults = [f for f in FIELDS.values() if isinstance(f.default, str) and f.choices]
    assert all(field.default in field.choices for field in defaults)


def values(field: Field) -> st.SearchStrategy[Any]:
    """Valid values of a field, from its declaration."""
    if field.path == "model":
        return st.sampled_from([name for name, model in MODELS.items() if model.is_moe])
    if field.path == "layout.stages":
        return st.sampled_from(["EtL", "Et*3|(tt|)*29m|L", "Et*4|(t*4|)*14tmL"])
    low, high = field.at_least or 0, 1e6 if field.at_most is None else field.at_most
    words = st.sampled_from(field.choices) if field.choices else st.text(max_size=12)
    by_type: dict[type, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(int(low), int(high)),
        float: st.floats(low, high),
        str: words,
        list: st.lists(words, unique=True, max_size=4),
    }
    return st.one_of([by_type[kind] for kind in field.types])


def raw_plans() -> st.SearchStrategy[dict[str, Any]]:
    """Any valid plan as dotted fields, sense not required."""
    optional = {path: values(field) for path, field in FIELDS.items() if path != "model"}
    return st.fixed_dictionaries({"model": values(FIELDS["model"])}, optional=optional)


@given(raw_plans(), st.booleans())
def test_a_dumped_plan_reads_back_the_same(path: Path, raw: dict[str, Any], complete: bool) -> None:
    plan = plan_of(raw)
    again = read(path, dump_plan(plan, complete))
    assert not again.findings
    assert again.plan == plan
    assert again.plan
    assert again.plan.hash == plan.hash


@given(raw_plans(), st.randoms(use_true_random=False))
def test_hash_knows_no_order(raw: dict[str, Any], shuffle: random.Random) -> None:
    shuffled = list(raw.items())
    shuffle.shuffle(shuffled)
    assert plan_of(dict(shuffled)).hash == plan_of(raw).hash
    assert re.fullmatch("[0-9a-f]{12}", plan_of(raw).hash)


@given(raw_plans(), st.data())
def test_hash_knows_every_field(raw: dict[str, Any], data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(list(FIELDS)))
    other = plan_of({**raw, path: data.draw(values(FIELDS[path]))})
    plan = plan_of(raw)
    assert (plan.hash == other.hash) == (plan.written == other.written)


def test_hash_differs_where_a_value_does() -> None:
    hashes = [
        plan_of({**QWEN, **more}).hash for more in ({}, {"layout.tp": 2}, {"layout.cp": 2}, {"job.packing": True})
    ]
    assert len(set(hashes)) == 4
    assert plan_of({**QWEN, "layout.tp": 1}).hash == hashes[0]  # a default that is written is still the default
    assert plan_of({"layout": {"tp": 2}, **QWEN}).hash == hashes[1]


def test_change_makes_a_copy() -> None:
    plan = plan_of({**QWEN, "layout.ep": 8, "cluster.gpus": 8})
    changed = change(plan, {"layout.ep": 4, "knobs.ep_overlap": True})
    assert (plan.layout.ep, plan.knobs.ep_overlap) == (8, False)
    assert (changed.layout.ep, changed.knobs.ep_overlap, changed.cluster.gpus) == (4, True, 8)
    assert change(changed, {"layout.ep": 8, "knobs.ep_overlap": None}) == plan
    assert change(plan, {"model.expert_model_parallel_size": 2}).layout.ep == 2
    with pytest.raises(FindingsError):
        change(plan, {"layout.ep": 0})
    with pytest.raises(FindingsError):
        change(plan, {"layout.ep": AUTO})
    with pytest.raises(AttributeError):
        plan.layout.ep = 4  # type: ignore[misc]


def test_change_keeps_a_cut_model() -> None:
    plan = plan_of({"model": {"name": "deepseek-v3", "num_layers": 4, "num_experts": 64}})
    assert (plan.model.num_layers, plan.model.num_experts) == (4, 64)
    assert change(plan, {"layout.tp": 2}).model == plan.model
    assert change(plan, {"model.num_layers": None}).model.num_layers == 61
    assert change(plan, {"model": "qwen3-30b-a3b"}).model.num_layers == 4
    assert tomllib.loads(dump_plan(plan)) == {"model": {"name": "deepseek-v3", "num_layers": 4, "num_experts": 64}}


def test_a_dense_model_has_no_experts_to_cut() -> None:
    assert rules_of(parse({"model": "llama3-8b", "model.num_experts": 8})) == [("unknown-field", "model.num_experts")]


def write_config(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **CONFIGS["llama"]}))


def test_a_relative_configuration_is_found_beside_the_plan(tmp_path: Path) -> None:
    write_config(tmp_path / "mine")
    parsed = read(tmp_path / "plan.toml", 'model = "hf:mine"')
    assert parsed.plan
    assert parsed.plan.model.dim == 4096
    assert change(parsed.plan, {"layout.tp": 2}).model == parsed.plan.model


@pytest.mark.parametrize("name", ["mine", "mine/config.json", "../plans/mine", "./mine/../mine/config.json"])
def test_a_plan_is_the_same_from_every_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans, away = tmp_path / "plans", tmp_path / "away"
    plans.mkdir()
    away.mkdir()
    write_config(plans / "mine")
    (plans / "plan.toml").write_text(f'model = "hf:{name}"')
    found = []
    for folder, path in ((tmp_path, "plans/plan.toml"), (plans, "plan.toml"), (away, "../plans/plan.toml")):
        monkeypatch.chdir(folder)
        plan = read_plan(path).plan
        assert plan
        found.append((plan.hash, dump_plan(plan)))
    assert len(set(found)) == 1
    file = plans / "mine" / "config.json" if name.endswith("json") else plans / "mine"
    assert tomllib.loads(found[0][1])["model"] == f"hf:{file}"
    (away / "written.toml").write_text(found[0][1])
    assert (again := read_plan("written.toml").plan)
    assert again.hash == found[0][0]


def test_a_draft_keeps_its_questions() -> None:
    parsed = parse({**QWEN, "layout": {"ep": AUTO, "tp": 2}, "knobs.recompute": AUTO})
    assert parsed.plan is None
    assert not parsed.findings
    assert set(parsed.free) == {"layout.ep", "knobs.recompute"}
    assert parsed.fields == {**QWEN, "layout.tp": 2}
    assert [finding.at for finding in free_findings(parsed.free)] == list(parsed.free)
    assert tomllib.loads(dump_fields({**parsed.fields, "layout.ep": AUTO}))["layout"] == {"tp": 2, "ep": AUTO}


@pytest.mark.parametrize("path", sorted(FREE))
def test_free_fields_may_be_auto(path: str) -> None:
    assert parse({**QWEN, path: AUTO}).free == (path,)


@pytest.mark.parametrize("path", ["job.seq_len", "cluster.chip", "target", "job.routing", "model.num_layers"])
def test_what_is_trained_is_the_users_word(path: str) -> None:
    parsed = parse({**QWEN, path: AUTO})
    assert not parsed.free
    assert_refused(parsed)


def test_an_override_settles_a_draft() -> None:
    assert plan_of({**QWEN, "layout.ep": AUTO}, {"layout.ep": 4}).layout.ep == 4


def test_overrides(path: Path) -> None:
    overrides = ["layout.ep=16", "knobs.ep_overlap=true", "knobs.recompute=moe,mlp", "knobs.graphs=['attn']"]
    plan = read(path, EXAMPLE, [*overrides, "job.routing=forced-balance", "stack.release=26.10"]).plan
    assert plan
    assert (plan.layout.ep, plan.layout.cp, plan.knobs.ep_overlap) == (16, 32, True)
    assert (plan.knobs.recompute, plan.knobs.graphs) == (("moe", "mlp"), ("attn",))
    assert (plan.job.routing, plan.stack.release) == ("forced-balance", "26.10")


@pytest.mark.parametrize(
    "override", ["layout.ep", "=3", "", " = ", "layout.ep=x", "layout.ep=", "layout.epp=4", "a=b=c"]
)
def test_bad_overrides_are_findings(override: str, path: Path) -> None:
    assert_refused(read(path, EXAMPLE, [override]))


@given(st.lists(st.text(max_size=20) | st.sampled_from(list(FIELDS)).flatmap(lambda p: st.text().map(f"{p}=".__add__))))
def test_any_override_is_a_plan_or_findings(path: Path, overrides: list[str]) -> None:
    parsed = read(path, EXAMPLE, overrides)
    assert parsed.plan or parsed.findings or parsed.free


def test_an_override_is_toml_or_text() -> None:
    fields, findings = parse_overrides(["a=1", "b=[1, 2]", "c=plain words", 'd="1"', "e=1\n2", "f= x = y "])
    assert not findings
    assert fields == {"a": 1, "b": [1, 2], "c": "plain words", "d": "1", "e": "1\n2", "f": "x = y"}


WRONG: list[Any] = [
    *("x", "", "8", True, 3, -1, 0.5, 1e300, float("nan"), float("inf"), 10**400, 16**5000),
    *([], [1], [["a"]], ["x"], {}, {"a": 1}, [{}], datetime.date(2026, 1, 1)),
]


def fits(field: Field, value: Any) -> bool:
    """By hand: whether a WRONG value happens to be right for a field."""
    kind = type(value)
    if kind is bool:
        return bool in field.types
    if kind is str:
        if list in field.types and str not in field.types:
            return value == "" or not field.choices  # no words at all, or any word
        return str in field.types and not field.choices and field.path not in ("model", "layout.stages")
    if kind in (int, float):
        whole = float(value).is_integer() if abs(value) < 1e308 else kind is int
        typed = float in field.types or (int in field.types and whole)
        low = float("-inf") if field.at_least is None else field.at_least
        high = 1e308 if field.at_most is None else field.at_most
        return typed and low <= value <= high
    if kind is list:
        return list in field.types and (value == [] or (value == ["x"] and not field.choices))
    is_group = field.path == "model"
    return kind is dict and is_group and not value


@pytest.mark.parametrize("path", list(FIELDS))
def test_wrong_values_of_every_field(path: str) -> None:
    for value in WRONG:
        parsed = parse({**QWEN, path: value})
        if fits(FIELDS[path], value) and path != "model":
            assert parsed.plan, (value, parsed.findings)
            continue
        assert_refused(parsed)
        assert all(finding.at.startswith(path) for finding in parsed.findings), (value, parsed.findings)


@pytest.mark.parametrize("path", [p for p, f in FIELDS.items() if int in f.types])
@pytest.mark.parametrize("value", [-1, -(2**40), 2**40, 10**30])
def test_absurd_numbers(path: str, value: int) -> None:
    parsed = parse({**QWEN, path: value})
    assert rules_of(parsed) == [("in-range", path)]
    # The fix is inside the range.
    fix = parsed.findings[0].fix_data
    assert fix
    assert parse({**QWEN, **fix}).plan


def test_degrees_of_any_size_have_a_plan() -> None:
    """What a plan derives never fails, even where a rule will refuse it."""
    huge = {f"layout.{axis}": 2**20 for axis in ("tp", "cp", "pp", "vpp", "ep", "etp", "replicate")}
    plan = plan_of({**QWEN, **huge})
    assert (plan.layout.dp, plan.num_microbatches) == (0, 0)
    assert len(plan.chunks) == 50  # by hand: one for each of 48 layers, embedding and loss
    assert plan.link("pp").degree == 2**20


NOT_A_PLAN = {
    "empty": b"",
    "blank": b" \n\t\n",
    "comment only": b"# nothing\n",
    "truncated string": b'model = "deep',
    "truncated table": b'model = "deepseek-v3"\n[layout',
    "truncated value": b'model = "deepseek-v3"\n[layout]\nep =',
    "two values": b'model = "a"\nmodel = "b"',
    "latin-1": 'model = "größe"'.encode("latin-1"),
    "utf-16": EXAMPLE.encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf" + EXAMPLE.encode(),
    "NUL bytes": b"\0" * 64,
    "NUL in text": b'model = "deepseek\0v3"',
    "binary": bytes(range(256)) * 8,
    "gzip": b"\x1f\x8b\x08\0" * 100,
    "json": b'{"model": "deepseek-v3"}',
    "yaml": b"model: deepseek-v3\nlayout:\n  ep: 8\n",
    "nested lists": b"model = " + b"[" * 5000 + b"]" * 5000,
    "nested tables": b"model = " + b"{a=" * 3000 + b"1" + b"}" * 3000,
    "nested keys": b".".join([b"a"] * 3000) + b" = 1",
    "nested keys of a table": b"layout." + b".".join([b"tp"] * 3000) + b" = 1",
    "long number": b"cluster.gpus = " + b"9" * 5000,
    "long hexadecimal number": b'model = "deepseek-v3"\ncluster.gpus = 0x' + b"f" * 5000,
    "long name": b'model = "' + b"x" * 100_000 + b'"',
    "long path": b'model = "hf:' + b"x" * 100_000 + b'"',
    "array of tables": b'model = "deepseek-v3"\n[[layout]]\nep = 8\n',
    "table for a field": b'model = "deepseek-v3"\n[layout.ep]\n',
    "unknown empty table": b'model = "deepseek-v3"\n[lay]\n',
    "field for a table": b'model = "deepseek-v3"\nlayout = 8\n',
    "too long": b"#" * (2**20 + 1),
}


@pytest.mark.parametrize("content", NOT_A_PLAN.values(), ids=NOT_A_PLAN)
def test_files_that_are_no_plan(content: bytes, path: Path) -> None:
    assert_refused(read(path, content))


@pytest.mark.parametrize("where", ["nowhere.toml", "", ".", "/", "a\0b", "x" * 5000, "/dev/zero"])
def test_paths_that_are_no_plan(where: str) -> None:
    parsed = read_plan(where)
    assert_refused(parsed)
    assert parsed.findings[0].rule == "file-readable"


def test_every_truncation_of_the_example(path: Path) -> None:
    """A file that was cut off is a shorter plan or refused."""
    for length in range(len(EXAMPLE)):
        parsed = read(path, EXAMPLE[:length])
        if parsed.plan is None:
            assert_refused(parsed)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(path: Path, content: bytes) -> None:
    assert_refused(read(path, content))


TOMLISH = st.text(alphabet=string.ascii_letters + string.digits + "\"'[]{}=.,\n #_-:+é\0", max_size=80)


@given(TOMLISH | st.text(max_size=80))
def test_any_text_in_a_plan_is_a_plan_or_findings(path: Path, text: str) -> None:
    for content in (text, f"{EXAMPLE}\n{text}", f"{text}\n{EXAMPLE}", EXAMPLE.replace("32", text, 1)):
        parsed = read(path, content.encode(errors="replace"))
        assert parsed.plan or parsed.free or parsed.findings
        if parsed.plan is None and not parsed.free:
            assert_refused(parsed)


NAMES = st.sampled_from([*FIELDS, *(name for path in FIELDS for name in path.split(".")), "dp", "flex"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(NAMES | st.text(max_size=6), ANYTHING, max_size=6), st.booleans())
def test_any_dictionary_is_a_plan_or_findings(raw: dict[str, Any], named: bool) -> None:
    parsed = parse({**raw, **QWEN} if named else raw)
    if parsed.plan is None and not parsed.free:
        assert_refused(parsed)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("layout.epp", "layout.ep"),
        ("knobs.overlap_ep", "knobs.ep_overlap"),
        ("knobs.recompte", "knobs.recompute"),
        ("job.seqlen", "job.seq_len"),
        ("cluster.chips", "cluster.chip"),
        ("layouts.ep", "layout.ep"),
        ("ep", "layout.ep"),
        ("global_batch", "job.global_batch"),
        ("moe_permute_fusions", "knobs.permute_fusion"),
        ("model.expert_model_parallel_siz", "expert_model_parallel_size"),
        ("layout.dp", "follows from cluster.gpus"),
    ],
)
def test_unknown_fields_name_the_nearest(written: str, meant: str) -> None:
    parsed = parse({**QWEN, written: 4})
    assert rules_of(parsed) == [("unknown-field", written)]
    assert meant in parsed.findings[0].fix_text


@pytest.mark.parametrize(
    ("path", "written", "fix"),
    [
        ("model", "deepseek-v33", "deepseek-v3"),
        ("cluster.chip", "h10", "h100"),
        ("knobs.precision", "fp8-blockwize", "fp8-blockwise"),
        ("knobs.dispatcher", "deep-ep", "deepep"),
        ("knobs.recompute", ["moe", "layernrm"], ["moe", "layernorm"]),
        ("target", "megatron", "megatron-bridge"),
    ],
)
def test_unknown_values_name_the_nearest(path: str, written: Any, fix: Any) -> None:
    parsed = parse({**QWEN, path: written})
    assert_refused(parsed)
    (finding,) = parsed.findings
    assert finding.at == path
    assert finding.fix_data == {path: fix}
    assert finding.fix_kind == "did you mean"


@pytest.mark.parametrize(
    ("path", "written", "meant"),
    [
        ("cluster.chip", "GB200", "gb200"),
        ("cluster.chip", "H100", "h100"),
        ("cluster.chip", "H100-SXM", "h100"),
        ("cluster.chip", "NVIDIA H100 80GB HBM3", "h100"),
        ("cluster.chip", "GB200_NVL72", "gb200"),
        ("model", "Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("model", "DeepSeek_V3", "deepseek-v3"),
        ("target", "Megatron_Bridge", "megatron-bridge"),
        ("Layout.EP", 8, 8),
        ("layout.schedule", "ZeroBubble", None),
        ("layout.schedule", "Zero-Bubble", "zero-bubble"),
        ("knobs.precision", "FP8_Blockwise", "fp8-blockwise"),
        ("knobs.precision", "bfloat16", "bf16"),
        ("knobs.recompute", ["MoE-Act"], ("moe_act",)),
        ("cluster.chip", "H100-PCIe", None),
        ("cluster.chip", "A100-40GB", None),
    ],
)
def test_names_are_read_in_any_case(path: str, written: Any, meant: Any) -> None:
    parsed = parse({**QWEN, path: written})
    if meant is None:
        assert [(finding.rule, finding.fix_kind) for finding in parsed.findings] == [("known-value", "did you mean")]
    else:
        assert not parsed.findings
        assert parsed.fields[path.lower()] == meant


@pytest.mark.parametrize(
    ("name", "value", "path"),
    [
        ("job.learning_rate", 2e-5, "job.lr"),  # Hugging Face's Trainer, TRL, axolotl
        ("per_device_train_batch_size", 2, "job.micro_batch"),
        ("max_length", 512, "job.seq_len"),
        ("job.max_seq_length", 512, "job.seq_len"),
        ("training.seq_len", 512, "job.seq_len"),
        ("max_steps", 7, "job.steps"),
        ("max_grad_norm", 0.5, "job.clip_norm"),
        ("warmup", 3, "job.warmup_steps"),
        ("sequence_len", 512, "job.seq_len"),
        ("sample_packing", True, "job.packing"),
        ("lora_r", 8, "job.lora_rank"),
        ("optimizer.lr", 2e-5, "job.lr"),  # torchtitan
        ("training.steps", 7, "job.steps"),
        ("lr_scheduler.warmup_steps", 3, "job.warmup_steps"),
        ("parallelism.tensor_parallel_degree", 2, "layout.tp"),
        ("parallelism.expert_parallel_degree", 4, "layout.ep"),
        ("checkpoint.interval", 9, "run.save_every"),
        ("--train-iters", 7, "job.steps"),  # Megatron's command line
        ("--lr-warmup-iters", 3, "job.warmup_steps"),
        ("optimizer.clip_grad", 0.5, "job.clip_norm"),
        ("gradient_checkpointing", True, "knobs.recompute"),
    ],
)
def test_names_of_other_trainers_that_mean_the_same(name: str, value: Any, path: str) -> None:
    parsed = parse({**QWEN, "job.global_batch": 2, name: value})
    assert not parsed.findings
    assert parsed.fields[path] == (("full",) if path == "knobs.recompute" else value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("job.epochs", 2, "job.steps = epochs x sequences / job.global_batch"),
        ("job.num_epochs", 3, "job.steps"),
        ("num_train_epochs", 3, "job.steps"),
        ("job.tokens", 10**12, "job.steps = tokens / (job.global_batch x job.seq_len)"),
        ("batch_size", 8, "job.micro_batch"),
        ("training.local_batch_size", 8, "job.micro_batch"),
        ("gradient_accumulation_steps", 8, "job.global_batch / (job.micro_batch x DP)"),
        ("warmup_ratio", 0.03, "job.warmup_steps"),
        ("optimizer.min_lr", 1e-5, "share of the peak"),
        ("lr_scheduler_type", "cosine", "job.min_lr"),
        ("parallelism.data_parallel_shard_degree", 8, "follows from cluster.gpus"),
        ("compile.enable", True, "knobs.compile"),
        ("deepspeed", "zero3.json", "knobs.data_parallel"),
    ],
)
def test_names_that_mean_something_else_are_explained(name: str, value: Any, said: str) -> None:
    [finding] = parse({**QWEN, name: value}).findings
    assert (finding.rule, finding.at) == ("unknown-field", name)
    assert finding.fix_data is None
    assert said in finding.advice


def test_another_trainers_name_leads_to_a_field() -> None:
    assert set(SAME.values()) <= set(FIELDS)
    assert not set(SAME) & set(OTHERWISE)


def test_all_findings_at_once() -> None:
    parsed = parse({"model": "no", "layout": {"ep": 0, "epp": 1}, "knobs": {"precision": "fp9"}, "job.stages": 1})
    places = {finding.at for finding in parsed.findings}
    assert places == {"model", "layout.ep", "layout.epp", "knobs.precision", "job.stages"}


@pytest.mark.parametrize(
    ("name", "value", "path", "meant"),
    [
        ("comm_overlap.overlap_moe_expert_parallel_comm", True, "knobs.ep_overlap", True),
        ("overlap_moe_expert_parallel_comm", True, "knobs.ep_overlap", True),
        ("optimizer.adam_beta1", 0.8, "job.adam_beta1", 0.8),
        ("optimizer.adam_beta2", 0.98, "job.adam_beta2", 0.98),
        ("optimizer.adam_eps", 1e-5, "job.adam_eps", 1e-5),
        ("model.mtp_loss_scaling_factor", 0.1, "job.mtp_weight", 0.1),
        ("optimizer.initial_loss_scale", 65536.0, "job.initial_loss_scale", 65536.0),
        ("optimizer.loss_scale_window", 500, "job.loss_scale_window", 500),
        ("--overlap-moe-expert-parallel-comm", True, "knobs.ep_overlap", True),
        ("model.expert_model_parallel_size", 8, "layout.ep", 8),
        ("cfg.model.expert_model_parallel_size", 8, "layout.ep", 8),
        ("model.pipeline_model_parallel_layout", "Et|tL", "layout.stages", "Et|tL"),
        ("model.num_moe_experts", 64, "model.num_experts", 64),
        ("model.recompute_modules", ["up_proj", "norm"], "knobs.recompute", ("mla_up_proj", "layernorm")),
        ("knobs.recompute", ["up_proj", "mla_up_proj", "moe"], "knobs.recompute", ("mla_up_proj", "moe")),
        ("model.recompute_granularity", "full", "knobs.recompute", ("full",)),
        ("model.moe_flex_dispatcher_backend", "deepep", "knobs.dispatcher", "deepep"),
        ("moe_flex_dispatcher_backend", "hybridep", "knobs.dispatcher", "hybridep"),
        ("moe_token_dispatcher_type", "alltoall", "knobs.dispatcher", "alltoall"),
        ("train.global_batch_size", 64, "job.global_batch", 64),
        ("dataset.sequence_length", 8192, "job.seq_len", 8192),
        ("optimizer.optimizer_cpu_offload", True, "knobs.optimizer_offload", 1.0),
        ("optimizer.optimizer_offload_fraction", 0.5, "knobs.optimizer_offload", 0.5),
        ("model.moe_router_force_load_balancing", True, "job.routing", "forced-balance"),
        ("model.moe_router_force_load_balancing", False, "job.routing", "learned"),
        ("mixed_precision.bf16", True, "knobs.precision", "bf16"),
        ("model.moe_expert_capacity_factor", 1, "job.capacity_factor", 1.0),
    ],
)
def test_megatron_names(name: str, value: Any, path: str, meant: Any) -> None:
    plan = plan_of({**QWEN, name: value})
    table, _, field = path.partition(".")
    assert getattr(getattr(plan, table), field) == meant
    assert plan == plan_of({**QWEN, path: meant})


def test_megatron_names_in_tables(path: Path) -> None:
    text = 'model.name = "qwen3-30b-a3b"\n[comm_overlap]\noverlap_moe_expert_parallel_comm = true\n'
    plan = read(path, text, ["model.expert_model_parallel_size=8"]).plan
    assert plan
    assert (plan.knobs.ep_overlap, plan.layout.ep) == (True, 8)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.recompute_granularity", "selective"),
        ("model.sequence_parallel", True),
        ("fp16", False),
        ("moe_a2a_overlap", False),
        ("moe_flex_dispatcher_backend", "None"),
    ],
)
def test_megatron_names_that_change_nothing(name: str, value: Any) -> None:
    assert plan_of({**QWEN, name: value}) == plan_of(QWEN)


@pytest.mark.parametrize(
    ("name", "value", "path"),
    [
        ("model.moe_router_force_load_balancing", "yes", "job.routing"),
        ("model.recompute_granularity", "fully", "knobs.recompute"),
        ("bf16", "yes", "bf16"),
        ("optimizer_cpu_offload", "yes", "knobs.optimizer_offload"),
        ("moe_token_dispatcher_type", "allgather", "knobs.dispatcher"),
        ("model.recompute_modules", ["up"], "knobs.recompute"),
        ("nonsense.expert_model_parallel_size", 8, "nonsense.expert_model_parallel_size"),
    ],
)
def test_megatron_names_are_checked_too(name: str, value: Any, path: str) -> None:
    parsed = parse({**QWEN, name: value})
    assert_refused(parsed)
    assert [finding.at for finding in parsed.findings] == [path]


@pytest.mark.parametrize(
    ("given", "precision"),
    [
        ({"bf16": True}, "bf16"),
        ({"fp16": True}, "fp16"),
        ({"bf16": False, "fp16": True}, "fp16"),
        ({"bf16": False, "fp16": False}, "fp32"),
        ({"bf16": False}, "fp32"),
        ({"bf16": True, "knobs.precision": "fp8-blockwise"}, "fp8-blockwise"),
        ({"bf16": False, "knobs.precision": "fp32"}, "fp32"),
        ({"fp16": True, "bf16": True}, None),
        ({"bf16": False, "knobs.precision": "mxfp8"}, None),
        ({"fp16": True, "knobs.precision": "bf16"}, None),
    ],
)
def test_the_base_is_what_both_switches_say(given: dict[str, Any], precision: str | None) -> None:
    parsed = parse({**QWEN, **given})
    assert (parsed.plan.knobs.precision if parsed.plan else None) == precision
    if precision is None:
        assert rules_of(parsed) == [("one-value-per-field", "knobs.precision")]
    over = parse({**QWEN, "knobs.precision": "mxfp8"}, {"model.bf16": True}).plan
    assert over is not None
    assert over.knobs.precision == "mxfp8"  # whose base is bf16


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("knobs.ep_overlap=True", True),
        ("knobs.ep_overlap=false", False),
        ("job.seq_len=32K", 32768),
        ("job.seq_len=1M", 1048576),
        ("job.seq_len=1.5k", 1536),
        ("knobs.recompute=layernorm,moe_act", ("layernorm", "moe_act")),
        ("knobs.recompute=[layernorm, moe_act]", ("layernorm", "moe_act")),
        ('knobs.recompute=["layernorm", "moe_act"]', ("layernorm", "moe_act")),
        ("knobs.recompute=['layernorm']", ("layernorm",)),
        ("knobs.graphs=attn moe_router moe_preprocess", ("attn", "moe_router", "moe_preprocess")),
        ("knobs.graphs=[]", ()),
        ('knobs.cp_comm="a2a+p2p"', "a2a+p2p"),
        ("knobs.cp_comm=p2p,a2a", ("p2p", "a2a")),
        ("layout.vpp=null", 1),
    ],
)
def test_values_are_read_as_people_write_them(text: str, value: Any) -> None:
    fields, wrong = parse_overrides([text])
    path = text.partition("=")[0]
    plan = parse({**QWEN, "layout.pp": 2, "layout.vpp": 2}, fields).plan
    assert not wrong
    assert plan is not None
    table, _, name = path.partition(".")
    assert getattr(getattr(plan, table), name) == value


@given(st.sampled_from(sorted(FIELDS)), st.data())
def test_an_override_is_read_as_it_was_written(path: str, data: st.DataObject) -> None:
    """Through a shell: what a fix says can be pasted."""
    if path in ("model", "layout.stages", "job.data") or path.startswith("model."):
        return
    value = data.draw(values(FIELDS[path]))
    words = shlex.split(as_override(path, value))
    fields, wrong = parse_overrides(words)
    assert not wrong
    assert normalize(fields) == normalize({path: value})
    json_fields, wrong = parse_overrides([f"{path}={json.dumps(value, ensure_ascii=False)}"])
    assert not wrong
    assert normalize(json_fields) == normalize({path: value})


def test_what_could_be_read_is_judged_beside_what_could_not() -> None:
    parsed = parse({**QWEN, "layout.ep": 7, "knobs.foo": 3, "knobs.precision": "fp9"})
    assert parsed.plan is None
    assert parsed.readable is not None
    assert parsed.readable.layout.ep == 7
    assert parsed.readable.knobs.precision == "bf16"
    assert parse({**QWEN, "knobs.foo": 3}, {"knobs.foo": None}).plan is not None  # an override takes it back


def test_a_misspelt_field_is_moved_to_its_name() -> None:
    [finding] = parse({**QWEN, "layout.eep": 8}).findings
    assert finding.fix_data == {"layout.eep": None, "layout.ep": 8}
    moved = parse({**QWEN, "layout.eep": 8}, finding.fix_data).plan
    assert moved is not None
    assert moved.layout.ep == 8


def test_flex_alone_is_refused() -> None:
    parsed = parse({**QWEN, "model.moe_token_dispatcher_type": "flex"})
    assert rules_of(parsed) == [("flex-needs-backend", "model.moe_token_dispatcher_type")]
    fix = parsed.findings[0].fix_data
    assert fix == {"knobs.dispatcher": "deepep"}
    # The fix on top cures it, and so does the backend beside it.
    assert plan_of({**QWEN, "model.moe_token_dispatcher_type": "flex"}, fix).knobs.dispatcher == "deepep"
    both = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
    assert plan_of({**QWEN, **both}).knobs.dispatcher == "hybridep"


@pytest.mark.parametrize("order", [1, -1])
def test_two_spellings_must_agree(order: int) -> None:
    said = {"moe_token_dispatcher_type": "alltoall", "moe_flex_dispatcher_backend": "deepep"}
    parsed = parse({**QWEN, **dict(list(said.items())[::order])})
    assert rules_of(parsed) == [("one-value-per-field", "knobs.dispatcher")]
    assert all(name in parsed.findings[0].problem for name in said)
    assert plan_of({**QWEN, "layout.ep": 8, "expert_model_parallel_size": 8}).layout.ep == 8
    assert parse({**QWEN, "layout.ep": 8, "expert_model_parallel_size": 4}).plan is None


def test_the_coupled_switch_warns_and_sets_both() -> None:
    parsed = parse({**QWEN, "comm_overlap.moe_a2a_overlap": True})
    assert [(f.rule, f.severity) for f in parsed.findings] == [("overlap-switch-couples", "warning")]
    assert parsed.plan
    knobs = parsed.plan.knobs
    assert (knobs.ep_overlap, knobs.delay_wgrad, knobs.shared_expert_overlap) == (True, True, False)


SCHEMA = jsonschema.Draft202012Validator(plan_schema())


def is_valid(text: str) -> bool:
    return bool(SCHEMA.is_valid(tomllib.loads(text)))


def test_schema_knows_the_example() -> None:
    jsonschema.Draft202012Validator.check_schema(plan_schema())
    assert is_valid(EXAMPLE)
    assert is_valid(EXAMPLE.replace("ep = 32", 'ep = "auto"'))


@given(raw_plans(), st.booleans())
def test_schema_knows_every_plan(raw: dict[str, Any], complete: bool) -> None:
    assert is_valid(dump_plan(plan_of(raw), complete))


@pytest.mark.parametrize(
    "more",
    [
        *(
            "epp = 1",
            "ep = 0",
            "ep = 'x'",
            "ep = true",
            "stages = 3",
            "schedule = 'gpipe'",
            "[other]",
            "[job]\nseq = 1",
        ),
        *("[knobs]\nprecision = 'fp9'", "[knobs]\nrecompute = ['x']", "[job]\nseq_len = 'auto'", "[job]\nmtp = -1"),
    ],
)
def test_schema_refuses_what_parsing_refuses(more: str, path: Path) -> None:
    text = f'model = "deepseek-v3"\n[layout]\n{more}\n'
    assert not is_valid(text)
    assert_refused(read(path, text))


def test_schema_wants_a_model() -> None:
    assert not is_valid("[layout]\nep = 8")
    assert is_valid('[model]\nname = "deepseek-v3"\nnum_layers = 4')
    assert not is_valid('[model]\nname = "deepseek-v3"\nlayers = 4')
    assert not is_valid("[model]\nnum_layers = 4")


def test_a_key_of_thousands_of_parts_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('model = "deepseek-v3"\n' + ".".join(["a"] * 20_000) + " = 1\n")
    [finding] = read_plan(str(path)).findings
    assert (finding.rule, finding.problem) == ("file-readable", "a key of more than 100 parts")


def test_a_pipe_is_read_and_a_silent_one_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell hands over `<(make_plan)` as a pipe; into a FIFO nobody may ever write."""
    reader, writer = os.pipe()
    os.write(writer, b'model = "tiny-qwen3-moe"\n')
    os.close(writer)
    assert read_plan(f"/dev/fd/{reader}").plan is not None
    os.close(reader)
    monkeypatch.setattr(toml_file, "SILENT_SECONDS", 0.1)
    os.mkfifo(tmp_path / "fifo")
    (finding,) = read_plan(str(tmp_path / "fifo")).findings
    assert finding.rule == "file-readable"
    assert "nothing was written" in finding.problem
