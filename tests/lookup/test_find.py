"""The search finds what users mean: phrases with the entries of which one must be among the first three."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from repository import ROOT

from threefold.api.plans import load_plan
from threefold.cli.find import describe
from threefold.cli.main import main
from threefold.interop.megatron.environment import EXPORTED_VARIABLES
from threefold.interop.megatron.export_plan import export_plan
from threefold.interop.megatron.releases import known_releases
from threefold.lookup.entries import KINDS, all_entries
from threefold.lookup.names import plan_field, setting_entries, settings, variables
from threefold.lookup.runs import run_entries
from threefold.lookup.search import find

PHRASES = tomllib.loads((Path(__file__).parent / "phrases.toml").read_text())


def is_meant(name: str, wanted: str) -> bool:
    lower = name.lower()
    return any(
        lower.startswith(one[:-1].lower()) if one.endswith("*") else lower == one.lower() for one in wanted.split("|")
    )


def test_phrases_find_what_is_meant() -> None:
    """A new entry may take the place of another one for a phrase or two."""
    first = {phrase: [entry.name for entry in find(phrase, most=3)] for phrase in PHRASES}
    missed = {
        phrase: names for phrase, names in first.items() if not any(is_meant(name, PHRASES[phrase]) for name in names)
    }
    assert len(missed) <= 0.03 * len(PHRASES), missed
    assert len(PHRASES) - len(missed) >= 200


def test_a_setting_is_told_with_its_releases_its_field_and_its_rules() -> None:
    told = describe("overlap_moe_expert_parallel_comm")
    assert told["plan_field"] == "knobs.ep_overlap"
    assert "ep-overlap-needs-ep" in told["rules"]
    holders = {(item["holder"], item["default"]) for item in told["declared"]}
    assert ("ModelParallelConfig", "False") in holders  # megatron-core 0.19.2, model_parallel_config.py


def test_a_setting_that_no_plan_has_is_told_from_its_release_on() -> None:
    [field, _] = describe("moe_paged_stash_page_size")["declared"]  # a field, and an argument of Megatron-LM
    assert (field["file"], field["first"]) == ("megatron/core/transformer/transformer_config.py", "0.5.1")
    assert describe("moe_paged_stash_page_size")["plan_field"] is None


def test_every_setting_of_an_export_is_told_with_the_field_behind_it() -> None:
    recipes = [load_plan(path) for path in sorted((ROOT / "recipes").glob("*.toml"))]
    exports = [export_plan(plan) for plan in recipes if plan.target == "megatron-bridge"]
    assert {path for export in exports for path in export.settings if plan_field(path) is None} == set()


def test_every_variable_of_an_export_is_told_with_its_reason() -> None:
    assert {*EXPORTED_VARIABLES, "CUDA_DEVICE_MAX_CONNECTIONS"} <= set(variables())
    assert "72" in describe("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN")["variable"]


def test_a_setting_is_told_with_what_must_be_set_with_it() -> None:
    [sizes, product, *_] = describe("hierarchical_context_parallel_sizes")["notes"]
    assert "a2a+p2p" in sizes  # Megatron Bridge 0.6.2, training/config.py asserts sizes, and their product
    assert "product is not CP" in product
    assert any("cuda_graph_modules since" in note for note in describe("cuda_graph_scope")["notes"])


def test_every_setting_of_the_newest_release_is_known_to_be_there() -> None:
    """`wheel_fields.json` has what classes inherit too; `settings.json` must know the class that declares it."""
    newest = known_releases()[-1]
    names = {name for group, names in newest.groups.items() if not group.endswith(".lacks") for name in names}
    there = {name for name, homes in settings().items() if any(home.last == newest.bridge for home in homes)}
    assert names - there == set()


def test_what_holds_for_a_group_of_settings_is_told_of_its_name() -> None:
    """NVIDIA's guide on resiliency asks for torch 2.5.1 and NCCL 2.26.2."""
    [note] = describe("inprocess_restart")["notes"]
    assert "2.5.1" in note
    assert "2.26.2" in note
    assert "inprocess_restart" in [entry.name for entry in find("What does in-process restart need?", most=3)]


def test_a_row_of_a_table_is_found_by_itself() -> None:
    """Its first cell is its name, and the others are what it says."""
    best = find("clocks of ranks in traces differ", kind="row", most=3)
    assert any("collectives give each rank's offset" in entry.answer for entry in best)


def test_an_unknown_setting_is_said_to_be_unknown() -> None:
    told = describe("moe_paged_stach")
    assert not told["known"]
    assert told["near"][0] == "moe_paged_stash"


def test_published_pairs_name_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["find", "--ab", "hybridep", "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)
    [pair] = [group for group in groups if group["group"] == "qwen3-30b-h100-hybridep-eproverlap"]
    assert pair["variable"] == "ep_overlap"
    assert [item["speed"] for item in pair["runs"]] == ["244 TFLOP/s", "286 TFLOP/s", "287 TFLOP/s"]


def test_every_entry_has_a_name_and_an_answer_of_one_line() -> None:
    entries = [*all_entries(), *setting_entries(), *run_entries()]
    assert [entry.name for entry in entries if not entry.name or "\n" in entry.name or "\n" in entry.answer] == []
    assert {entry.kind for entry in entries} == set(KINDS)


def test_a_search_reads_pages_and_no_more() -> None:
    """A search is to end within 0.3 s of CPU. A clock measures how busy a machine is; what is imported takes most."""
    shown = "import sys, threefold.lookup.search as s; s.find('a2a overlap'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True)
    heavy = ("threefold.cost", "threefold.remedies", "threefold.rules", "threefold.engine", "torch", "numpy")
    assert [name for name in done.stdout.split() if name.startswith(heavy)] == []
