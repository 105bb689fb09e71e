"""`threefold tune` as a command, with a fake measurer; and one tuning of a tiny plan with the engine."""

import json
from pathlib import Path

import pytest

from tests.support.command_line import run
from tests.support.fake_measurer import FakeMeasurer
from tests.support.tuned_plans import plan_to_tune
from threefold.api import tunings
from threefold.machine.inventory import Machine
from threefold.plan.file import dump_plan
from threefold.tune import engine_measurer
from threefold.tune.cards import read_card

HERE = Machine("3.11.0", "Linux", versions={"torch": "2.13.0"})


@pytest.fixture
def plan_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tunings, "this_machine", lambda try_kernels: HERE)
    path = tmp_path / "plan.toml"
    path.write_text(dump_plan(plan_to_tune()))
    return path


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMeasurer:
    fake = FakeMeasurer(lambda plan: 1.0 - 0.1 * (plan.job.micro_batch // 4), noise=0.003)
    monkeypatch.setattr(engine_measurer, "EngineMeasurer", lambda *words: fake)
    return fake


def test_it_tells_and_goes_on(
    plan_file: Path, machine: FakeMeasurer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ("tune", str(plan_file), "--budget", "20m", "--out", str(out))
    code, text, _ = run(*words, "--json", capsys=capsys)
    assert code == 0
    found = json.loads(text)
    assert found["winner"]["set"]["job.micro_batch"] == 8
    assert (out / "winner.toml").exists()
    card = read_card(out / "card.toml", Path.cwd())
    assert card.figures[0].value == pytest.approx(found["speedup"], rel=1e-3)
    assert "--try" in card.command
    count = len(machine.plans)
    code, text, _ = run(*words, capsys=capsys)
    assert code == 0
    assert len(machine.plans) == count
    assert "times as fast (99 % interval" in text
    code, text, _ = run("tune", "--show", str(out), capsys=capsys)
    assert code == 0
    assert "job.micro_batch=8" in text
    assert "better" in text
    code, text, _ = run(*words, "job.seq_len=64", capsys=capsys)
    assert code == 1
    assert "same-tuning" in text
    assert "job.seq_len" in text


def test_asked_traps_are_refused_with_the_reason(
    plan_file: Path, machine: FakeMeasurer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("tune", str(plan_file), "--try", "job.capacity_factor=0.5", "--trials", "1", "--out", str(tmp_path / "o"))
    code, text, _ = run(*words, capsys=capsys)
    assert code == 0
    assert "a capacity leaves tokens out" in text


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((), 2),
        (("--budget", "soon"), 2),
        (("--budget", "0"), 2),
        (("--trials", "-1"), 2),
        (("--show", "no-such-folder"), 1),
        (("no-such-plan.toml",), 1),
        (("{plan}", "--keep", "knobs.precison"), 1),
        (("{plan}", "--rank", "1"), 1),
        (("{plan}", "--rank", "-1"), 2),
    ],
)
def test_wrong_command_lines(
    words: tuple[str, ...], code: int, plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out, err = run("tune", *(word.format(plan=plan_file) for word in words), capsys=capsys)
    assert found == code
    assert "Traceback" not in out + err


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_tiny_plan_with_the_engine(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """32 microbatches of one sequence of eight tokens are five times slower than four of eight sequences. Other work on
    the machine makes single trials up to four times slower, so that a smaller gain is not certain everywhere."""
    words = ("job.micro_batch=1", "job.global_batch=32", "job.seq_len=8", "--budget", "240s", "--trials", "2")
    code, text, err = run("tune", str(plan_file), *words, "--out", str(tmp_path / "out"), "--json", capsys=capsys)
    assert code == 0, err
    found = json.loads(text)
    assert found["baseline"]["losses_finite"]
    assert found["wall"]["source"] == "measured"
    assert found["winner"] is not None, text
    assert found["winner"]["set"]["job.micro_batch"] > 1
    assert found["interval"][0] > 1
    assert found["winner"]["num_steps"] == 50
    assert found["confirmation"]["losses"]["agrees"]
