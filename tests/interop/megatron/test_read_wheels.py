"""Names are read from wheels without importing them: a small wheel made here, and the real ones where they are."""

import json
import os
import zipfile
from pathlib import Path

import pytest
from read_wheels import PAIRS, Sources, as_json, read_folder
from repository import ROOT

from threefold.interop.megatron.releases import known_releases

FACTS = ROOT / "threefold" / "interop" / "megatron" / "wheel_fields.json"
FILES = {
    "megatron/core/base.py": """
from dataclasses import dataclass, field
raise RuntimeError("imported")
@dataclass
class Base:
    tensor_size: int = 1
    fusion: bool = True
    names: list[str] | None = None
    derived: int = field(init=False, default=0)
    _hidden: int = 0
""",
    "megatron/core/__init__.py": "from .base import Base as Core\n",
    "megatron/training/arguments.py": """
from megatron.core import Core
def add(parser):
    exclude = ["tensor_size"]
    ArgumentGroupFactory(Core, exclude=exclude).build_group(parser)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--no-speed", action="store_false", dest="speed")
    parser.add_argument("--sizes", nargs="+")
""",
    "megatron/bridge/config.py": """
from megatron.core import Core
class Config(Core):
    seq_length: int
    tensor_size: int = 2
def apply(model_config, backend=None, *, more=1): ...
""",
}


def wheel(folder: Path) -> Sources:
    path = folder / "megatron_core-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
    return Sources([path])


def test_fields_follow_bases_over_renamed_and_relative_imports(tmp_path: Path) -> None:
    fields = wheel(tmp_path).fields("megatron.bridge.config", "Config")
    assert list(fields) == ["tensor_size", "fusion", "names", "derived", "seq_length"]


def test_arguments_are_those_that_are_added_and_those_made_of_fields(tmp_path: Path) -> None:
    assert wheel(tmp_path).arguments == {
        "--bf16": ["bf16", "flag"],
        "--disable-fusion": ["fusion", "off"],
        "--names": ["names", "list"],
        "--no-fusion": ["fusion", "off"],
        "--no-speed": ["speed", "off"],
        "--sizes": ["sizes", "list"],
    }


def test_functions_have_their_parameters(tmp_path: Path) -> None:
    sources = wheel(tmp_path)
    assert sources.function("megatron.bridge.config.apply") == ["model_config", "backend", "more"]
    assert sources.function("megatron.bridge.config.nosuch") is None


def test_the_shipped_facts_hold_what_was_read_by_hand() -> None:
    """Looked up in the wheels' sources: fields that came, went or moved between releases."""
    oldest, *_, newest = known_releases()
    assert [release.bridge for release in known_releases()] == list(PAIRS)
    assert oldest.has_field("model.cuda_graph_scope")
    assert not oldest.has_field("model.cuda_graph_modules")
    assert newest.has_field("model.cuda_graph_modules")
    assert not oldest.has_field("validation.eval_interval")  # still in TrainingConfig
    assert newest.has_field("dataset.seq_length")
    assert not known_releases()[2].has_field("dataset.seq_length")
    assert newest.has_field("model.q_lora_rank", "mla")
    assert not newest.has_field("model.q_lora_rank", "gpt")
    assert newest.by_argument["--no-gradient-accumulation-fusion"].kind == "off"
    assert newest.by_field["fp8"].name == "--fp8-format"


@pytest.mark.skipif("MEGATRON_WHEELS" not in os.environ, reason="MEGATRON_WHEELS names no folder of wheels")
def test_the_shipped_facts_are_those_of_the_wheels() -> None:
    """MEGATRON_WHEELS: a folder with the wheels of `PAIRS`, as `pip download --no-deps` leaves them."""
    read = read_folder(Path(os.environ["MEGATRON_WHEELS"]))
    assert [release["bridge"] for release in read] == list(PAIRS)
    assert json.loads(as_json(read)) == json.loads(FACTS.read_text(encoding="utf-8"))
