"""The stand-in for the DeepEP package: its traffic, and how it is put in place."""

import math
import sys
from types import ModuleType

import pytest
from plans import build
from rehearsal_plans import GPU

from threefold.dryrun.rehearse_rank import rehearse_rank
from threefold.dryrun.simulated.deepep_package import fake_deepep_package, rank_visit_probability
from threefold.dryrun.simulated.expert_load import ExpertLoads
from threefold.engine.dispatch.packages.find_package import PACKAGE


@pytest.mark.parametrize("name", ["deepep", "hybridep"])
def test_flex_dispatchers_send_a_token_once_to_a_rank(name: str) -> None:
    """A token with 8 of 128 experts has any on one of 8 ranks with 1 - C(112, 8) / C(128, 8) = 67 %."""
    chance = 1 - math.comb(112, 8) / math.comb(128, 8)
    assert rank_visit_probability(128, 8, 8) == pytest.approx(chance)
    sent = [e for e in rehearse_rank(build({**GPU, "knobs.dispatcher": name}), 0).collectives if e.axis == "ep"]
    assert {(e.operation, e.count) for e in sent} == {("dispatch", 4), ("combine", 4)}  # both ways, two microbatches
    assert sent[0].num_bytes == pytest.approx(4096 * 8 * chance * 7 / 8 * 2048 * 2, rel=1e-3)


def test_what_was_imported_beside_a_stand_in_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile's backend is imported when first asked for, and cannot be imported twice."""
    mine, other = ModuleType(PACKAGE), "imported_in_a_rehearsal"
    monkeypatch.setitem(sys.modules, PACKAGE, mine)
    monkeypatch.delitem(sys.modules, other, raising=False)
    with fake_deepep_package(ExpertLoads().size_source(), 2, lambda *call: None):
        assert sys.modules[PACKAGE] is not mine
        monkeypatch.setitem(sys.modules, other, ModuleType(other))
    assert sys.modules[PACKAGE] is mine
    assert other in sys.modules
    monkeypatch.delitem(sys.modules, PACKAGE)
    with fake_deepep_package(ExpertLoads().size_source(), 2, lambda *call: None):
        pass
    assert PACKAGE not in sys.modules
