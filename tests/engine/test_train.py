"""Training: optimizers, one step, and runs that end, stop, are killed and go on."""

import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT
from tiny_runs import DEEPSEEK, run_to_the_end, tiny_plan, tiny_shard, unigram_entropy
from torch import Tensor

from threefold.engine import train as train_module
from threefold.engine.batch import Batch
from threefold.engine.build import build, parts_alone
from threefold.engine.data.embedded_corpus import embedded_corpus
from threefold.engine.dist.join import join
from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.optim.adamw import AdamW
from threefold.engine.optim.lr_schedule import learning_rate
from threefold.engine.optim.muon import Muon, orthogonalize
from threefold.engine.run.checkpoints import Checkpoints, read_checkpoint, write_checkpoint
from threefold.engine.run.dcp import CheckpointShard
from threefold.engine.run.folder import CHECKPOINTS, METRICS
from threefold.engine.step import train_step
from threefold.engine.train import train
from threefold.engine.train_hooks import evaluate
from threefold.engine.train_state import TrainState
from threefold.findings import FindingsError
from threefold.plan.plan import Job
from threefold.spec.models import MODELS

# Fields of a metrics line that differ from run to run.
TIMING = {"seconds", "tokens_per_second", "useful_tokens_per_second", "tflops", "tflops_per_gpu", "memory_bytes"}
TIMING |= {"data_seconds"}
MUON = {"job.optimizer": "muon"}
NARROW = {"knobs.precision": "bf16", "knobs.optimizer_dtype": "bf16"}
LONG = 100_000  # steps: ended by a signal
HANG_SECONDS = 600.0  # after which a test fails: long enough for a machine with much other work


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"job.data": tiny_shard(tmp_path_factory.mktemp("data") / "counting.tok")}


def quiet(text: str) -> None:
    pass


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Also where both are NaN."""
    return left.dtype == right.dtype and torch.equal(
        left.flatten().view(torch.uint8), right.flatten().view(torch.uint8)
    )


def differing(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    return sorted(left.keys() ^ right.keys()) + [
        n for n in left.keys() & right.keys() if not same_bits(memory_of(left[n]), memory_of(right[n]))
    ]


def copied(tensors: dict[str, Tensor | CheckpointShard]) -> dict[str, Tensor]:
    return {name: memory_of(value).clone() for name, value in tensors.items()}


def memory_of(value: Tensor | CheckpointShard) -> Tensor:
    return value.memory if isinstance(value, CheckpointShard) else value


def checkpoints(folder: Path) -> Checkpoints:
    return Checkpoints(folder / CHECKPOINTS, 2)


def newest(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    kept = checkpoints(folder)
    return read_checkpoint(kept.path(kept.steps()[-1]))


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMING} for line in lines]


# Optimizers


SHAPES = {"proj": (8, 6), "experts": (3, 4, 5), "norm": (6,), "gate_up_bias": (3, 4)}
DECAYED = {"proj", "experts"}  # matrices; a bias of stacked experts is a vector of each


def parameters(dtype: Any = torch.float32) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in SHAPES.items()}
    return {name: torch.nn.Parameter(value) for name, value in made.items()}


def torch_adamw(params: dict[str, Tensor], decay: float) -> Any:
    groups = [
        {"params": [p for name, p in params.items() if name in DECAYED], "weight_decay": decay},
        {"params": [p for name, p in params.items() if name not in DECAYED], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=False, foreach=False)


def drive(ours: Any, params: dict[str, Tensor], theirs: Any = None, twins: dict[str, Tensor] | None = None) -> None:
    """Twenty steps of the same gradients and changing rates; `twins` belong to torch's optimizer."""
    draw = torch.Generator().manual_seed(1)
    for step in range(20):
        lr = 1e-2 / (1 + step)
        for name, p in params.items():
            p.grad = torch.randn(p.shape, generator=draw).to(p.dtype)
            if twins:
                twins[name].grad = p.grad.to(twins[name].dtype)
        ours.step(lr)
        if theirs:
            for group in theirs.param_groups:
                group["lr"] = lr
            theirs.step()


def test_adamw_is_torchs_with_decay_on_matrices_only() -> None:
    params, twins = parameters(), parameters()
    drive(AdamW(params.items(), 0.1), params, torch_adamw(twins, 0.1), twins)
    for name in SHAPES:
        # The fused kernel multiplies in another order: a few units in the last place over twenty steps.
        torch.testing.assert_close(params[name], twins[name], rtol=1e-6, atol=1e-7)


def test_narrow_parameters_follow_an_fp32_master() -> None:
    params = parameters(torch.bfloat16)
    twins = {name: torch.nn.Parameter(p.detach().float()) for name, p in params.items()}
    ours = AdamW(params.items(), 0.1)
    drive(ours, params, torch_adamw(twins, 0.1), twins)
    for name, p in params.items():
        torch.testing.assert_close(ours.master[name], twins[name].detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(p, ours.master[name].bfloat16())


@pytest.mark.parametrize("make", [AdamW, Muon])
def test_without_masters_the_update_is_rounded_into_the_weight(make: Any) -> None:
    params, twins = parameters(torch.bfloat16), parameters(torch.bfloat16)
    ours, theirs = make(params.items(), 0.1, master=False), make(twins.items(), 0.1)
    draw = torch.Generator().manual_seed(0)  # no gradient may cancel a weight, whose rounding would be all that is left
    for p, twin in zip(params.values(), twins.values(), strict=True):
        p.grad = twin.grad = torch.randn(p.shape, dtype=torch.bfloat16, generator=draw)
    ours.step(1e-2)
    theirs.step(1e-2)
    assert not any("master" in name for name in ours.state_dict())
    for name in SHAPES:
        # One step from the same weights. Muon shrinks and adds apart, and so rounds twice.
        torch.testing.assert_close(params[name], twins[name], rtol=0 if make is AdamW else 2**-7, atol=0)


@pytest.mark.parametrize(("optimizer", "kept"), [("adamw", True), ("adamw", False), ("muon", False)])
def test_a_plan_says_whether_there_are_master_weights(optimizer: str, kept: bool, data: dict[str, Any]) -> None:
    plan = tiny_plan({**data, **NARROW, "job.optimizer": optimizer, "knobs.master_weights": kept})
    names = build(plan).optimizer.state_dict()
    assert any("master" in name for name in names) == kept


def test_narrow_moments_stay_close() -> None:
    start, wide, narrow = parameters(), parameters(), parameters()
    drive(AdamW(wide.items(), 0.0), wide)
    optimizer = AdamW(narrow.items(), 0.0, "bf16")
    drive(optimizer, narrow)
    assert all(value.dtype.itemsize == 2 for value in (optimizer.exp_avg | optimizer.exp_avg_sq).values())
    for name in SHAPES:
        moved = (wide[name] - start[name]).norm()
        # bf16 rounds a moment by up to 2^-9 a step; the second one remembers about 20 steps: some 20^0.5 x 0.2% = 1%.
        assert (narrow[name] - wide[name]).norm() < 0.02 * moved


@pytest.mark.parametrize(("fields", "weight"), [({}, 0.3), ({"job.mtp_weight": 0.05}, 0.05)])
def test_a_plan_weighs_the_loss_of_mtp(fields: dict[str, Any], weight: float, data: dict[str, Any]) -> None:
    """0.3 is the weight of DeepSeek-V3's technical report for its first 10T tokens."""
    plan = tiny_plan({**data, **DEEPSEEK, **fields})
    parts = build(plan)
    assert parts.loader is not None
    aux = train_step(parts, [parts.loader.batch(0, m) for m in range(2)], 0.0, plan.job).aux
    parts.close()
    assert aux["weighted/mtp"] == pytest.approx(weight * aux["mtp"])
    assert aux["mtp"] > 1


def test_parameters_without_gradient_stay() -> None:
    params = parameters()
    before = copied(params)
    optimizer = AdamW(params.items(), 0.1)
    params["proj"].grad = torch.ones(SHAPES["proj"])
    optimizer.step(0.1)
    assert {name for name in SHAPES if not torch.equal(params[name], before[name])} == {"proj"}


@pytest.mark.parametrize("shape", [(32, 16), (16, 32), (3, 8, 24)])
def test_orthogonalise_brings_singular_values_near_one(shape: tuple[int, ...]) -> None:
    update = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    made = orthogonalize(update)
    values = torch.linalg.svdvals(made)
    # Jordan et al. chose the coefficients for speed: values land between 0.7 and 1.2, not on 1.
    assert values.min() > 0.65
    assert values.max() < 1.25
    left, _, right = torch.linalg.svd(update, full_matrices=False)
    polar = left @ right  # the nearest semi-orthogonal matrix
    assert (made - polar).norm() < 0.3 * polar.norm()


def test_a_stack_of_matrices_is_made_orthogonal_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = torch.randn(5, 8, 24, generator=torch.Generator().manual_seed(0))
    whole = orthogonalize(stack)
    monkeypatch.setattr("threefold.engine.optim.muon._MAX_NUMEL_AT_ONCE", 2 * 8 * 24)
    torch.testing.assert_close(orthogonalize(stack), whole)
    torch.testing.assert_close(whole[3], orthogonalize(stack[3]))


def test_muon_takes_matrices_and_learns() -> None:
    model = build_model(MODELS["tiny-gpt-oss"])
    muon = Muon(model.named_parameters(), 0.1)
    taken = {name for name, _ in muon.matrices}
    assert {"layers.0.ffn.experts.gate_up", "layers.0.ffn.experts.down"} <= taken
    assert not [name for name in taken if "bias" in name or "norm" in name or name in ("embed.weight", "head.weight")]
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.nn.Parameter(torch.zeros(8, 12)), torch.randn(64, 12, generator=draw)
    wanted = x @ torch.randn(12, 8, generator=draw)
    optimizer = Muon([("proj", weight)], 0.0)
    losses = []
    for step in range(100):
        loss = (x @ weight.T - wanted).square().mean()
        weight.grad = None
        loss.backward()
        losses.append(loss.item())
        optimizer.step(0.2 * (1 - step / 100))
    assert losses[-1] < 0.01 * losses[0]


def rates(steps: int, **fields: Any) -> list[float]:
    job = Job(steps=steps, lr=1.0, **fields)
    return [learning_rate(job, step) for step in range(steps)]


def test_schedules_by_hand() -> None:
    assert rates(6, warmup_steps=4, lr_schedule="constant") == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    # Cosine from 1 at step 2 to 0.2 at step 6: 0.2 + 0.8 * (1 + cos(pi * k / 4)) / 2.
    root = math.sqrt(0.5)
    cosine = [0.5, 1, 1, 0.2 + 0.4 * (1 + root), 0.6, 0.2 + 0.4 * (1 - root), 0.2]
    assert rates(7, warmup_steps=2, lr_schedule="cosine", min_lr=0.2) == pytest.approx(cosine)
    # Four of ten steps decay, in a straight line that ends on the last one.
    wsd = [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.0]
    assert rates(10, warmup_steps=2, lr_schedule="wsd", decay_fraction=0.4, min_lr=0.0) == pytest.approx(wsd)
    assert rates(1, warmup_steps=0, lr_schedule="cosine") == [1.0]


# One step


def uneven_batch() -> Batch:
    """Four sequences with 31, 3, 0 and 17 labels."""
    draw = torch.Generator().manual_seed(0)
    tokens_BS, labels_BS = (torch.randint(512, (4, 32), generator=draw) for _ in range(2))
    for row, count in enumerate((31, 3, 0, 17)):
        labels_BS[row, count:] = -100
    return Batch(tokens_BS, labels_BS)


def rows(batch: Batch, start: int, stop: int) -> Batch:
    return Batch(batch.tokens_BS[start:stop], batch.labels_BS[start:stop])


@pytest.mark.parametrize("cuts", [(0, 2, 4), (0, 1, 2, 3, 4), (0, 3, 4)])
def test_microbatches_add_up_to_the_whole_batch(cuts: tuple[int, ...]) -> None:
    """The mean over all labels, however they are spread. Balancing losses are per microbatch by nature: none here."""
    plan, batch = tiny_plan({}), uneven_batch()
    model = build_model(plan.model, options=Options(aux_loss=0.0))
    job = Job(clip_norm=0.0)
    found = []
    for parts in ([batch], [rows(batch, a, b) for a, b in pairwise(cuts)]):
        result = train_step(parts_alone(model, AdamW(model.named_parameters(), 0.0)), parts, 0.0, job)
        assert result.num_tokens == 51
        found.append((result, {name: p.grad.clone() for name, p in model.named_parameters()}))
    (whole, grads), (split, sums) = found
    assert split.loss == pytest.approx(whole.loss, rel=1e-6)
    assert split.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    for name, grad in grads.items():
        # fp32 sums in another order.
        torch.testing.assert_close(sums[name], grad, rtol=1e-4, atol=1e-6 * float(grad.abs().max()))


def trainer_of(fields: dict[str, Any], folder: Path) -> TrainState:
    plan = tiny_plan(fields)
    return TrainState(plan, folder, build(plan), checkpoints(folder), join(plan))


def one_step(trainer: TrainState, step: int) -> Any:
    parts, plan = trainer.parts, trainer.plan
    batches = [parts.loader.batch(step, m) for m in range(plan.num_microbatches)]
    return train_step(parts, batches, 1e-3, plan.job)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("extra", [{}, MUON, DEEPSEEK], ids=["adamw", "muon", "deepseek"])
def test_gradients_that_are_not_finite_change_nothing(
    poison: float, extra: dict[str, Any], data: dict[str, Any], tmp_path: Path
) -> None:
    trainer = trainer_of({**data, **extra}, tmp_path)
    assert one_step(trainer, 0).applied
    before = copied(trainer.tensors())
    hook = trainer.parts.model.embed.weight.register_hook(lambda grad: grad + poison)
    result = one_step(trainer, 1)
    hook.remove()
    assert not result.applied
    assert math.isfinite(result.loss)
    assert not math.isfinite(result.grad_norm)
    assert differing(before, trainer.tensors()) == []
    assert one_step(trainer, 2).applied
    assert differing(before, trainer.tensors())
    trainer.parts.close()


def test_too_many_bad_steps_end_the_run_with_everything_saved(data: dict[str, Any], tmp_path: Path) -> None:
    """A weight that is not finite makes every loss so."""
    plan = tiny_plan({**data, "job.steps": 12, "run.save_every": 4, "run.bad_steps": 2, "run.keep": 9})
    train(plan, tmp_path, quiet)
    kept = checkpoints(tmp_path)
    for step in (8, 12):
        shutil.rmtree(kept.path(step))
    tensors, facts = read_checkpoint(kept.path(4))
    tensors["model.norm.weight"][0] = float("nan")
    write_checkpoint(kept.path(4), tensors, facts)
    with pytest.raises(FindingsError) as caught:
        train(plan, tmp_path, quiet)
    [finding] = caught.value.findings
    assert (finding.rule, finding.at) == ("loss-is-finite", "step 7")
    assert "3 steps" in finding.problem
    assert kept.steps() == [4, 7]
    after, told = newest(tmp_path)
    assert (
        differing(
            {n: v for n, v in tensors.items() if n != "rng.cpu"}, {n: v for n, v in after.items() if n != "rng.cpu"}
        )
        == []
    )
    assert (told["step"], told["bad_steps"], told["loader"]["step"]) == (7, 3, 7)
    assert [line["skipped_steps"] for line in metrics(tmp_path)] == [0, 0, 0, 0, 1, 2, 3]
    with pytest.raises(FindingsError, match="4 steps had"):  # and what was saved can be gone on with
        train(plan, tmp_path, quiet)


def test_evaluation_leaves_every_state_as_it_was(data: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_of({**data, **DEEPSEEK, "run.eval_every": 1, "run.eval_batches": 3}, tmp_path)
    one_step(trainer, 0)
    before, where = copied(trainer.tensors()), trainer.facts()
    grads = [p.grad.clone() for p in trainer.parts.model.parameters()]
    first, second = evaluate(trainer), evaluate(trainer)
    assert first == second
    assert math.isfinite(first["held-out"])
    assert differing(before, trainer.tensors()) == []
    assert trainer.facts() == where
    assert trainer.parts.model.training
    assert all(torch.equal(p.grad, g) for p, g in zip(trainer.parts.model.parameters(), grads, strict=True))
    trainer.parts.close()


# Runs


def test_how_a_run_is_kept_does_not_change_it(data: dict[str, Any], tmp_path: Path) -> None:
    finals = []
    for number, kept in enumerate(
        [
            {"run.eval_every": 2, "run.eval_batches": 2},
            {"run.eval_every": 3, "run.eval_batches": 1, "run.save_every": 2, "run.log_every": 3, "run.gc_every": 1},
        ]
    ):
        folder = tmp_path / str(number)
        train(tiny_plan({**data, "job.steps": 6, **kept}), folder, quiet)
        finals.append(newest(folder))
    (tensors, facts), (others, their_facts) = finals
    assert differing(tensors, others) == []
    assert facts.pop("best") != their_facts.pop("best")  # of evaluations, which are at other steps on other data
    assert facts == their_facts


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param({}, id="adamw", marks=pytest.mark.slow),
        pytest.param(MUON, id="muon", marks=pytest.mark.slow),
        pytest.param(DEEPSEEK, id="deepseek"),
        pytest.param(NARROW, id="bf16"),
        pytest.param({**NARROW, **MUON, "knobs.master_weights": False}, id="bf16 muon without masters"),
        pytest.param({"job.packing": True}, id="packing", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(extra: dict[str, Any], data: dict[str, Any], tmp_path: Path) -> None:
    steps, whole = 6, tmp_path / "whole"
    plan = tiny_plan({**data, **extra, "job.steps": steps, "run.save_every": 1, "run.keep": steps, "run.eval_every": 2})
    train(plan, whole, quiet)
    tensors, facts = newest(whole)
    assert any("balance_bias" in name for name in tensors) == ("model" in extra)
    for stop in (1, 2, 5, 6):
        folder = tmp_path / str(stop)
        shutil.copytree(whole, folder)
        for later in range(stop + 1, steps + 1):
            shutil.rmtree(checkpoints(folder).path(later))
        trainer = train(plan, folder, quiet)
        assert trainer.step == steps
        again, told = newest(folder)
        assert differing(tensors, again) == [], f"resumed behind step {stop}"
        assert told == facts
        assert metrics(folder) == metrics(whole)


def test_metrics_past_the_resume_point_are_dropped(data: dict[str, Any], tmp_path: Path) -> None:
    plan = tiny_plan({**data, "job.steps": 4, "run.save_every": 2})
    train(plan, tmp_path, quiet)
    before = metrics(tmp_path)
    shutil.rmtree(checkpoints(tmp_path).path(4))
    with (tmp_path / METRICS).open("a", encoding="utf-8") as file:
        file.write('{"step": 7, "loss": 1.0}\n{"step": 3, "lo')  # the second was cut off by a kill
    train(plan, tmp_path, quiet)
    assert metrics(tmp_path) == before


def test_the_folder_of_another_plan_is_refused(data: dict[str, Any], tmp_path: Path) -> None:
    train(tiny_plan({**data, "job.steps": 1}), tmp_path, quiet)
    before = sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*"))
    with pytest.raises(FindingsError) as caught:
        train(tiny_plan({**data, "job.steps": 1, "job.lr": 0.5}), tmp_path, quiet)
    [finding] = caught.value.findings
    assert finding.rule == "run-is-this-plan"
    assert finding.fix_text
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*")) == before


def means(losses: list[float]) -> list[float]:
    return [sum(losses[start : start + 20]) / 20 for start in range(0, len(losses), 20)]


def test_the_loss_follows_the_stored_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = json.loads((ROOT / "tests" / "data" / "loss_curve.json").read_text(encoding="utf-8"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    train(tiny_plan(stored["fields"]), tmp_path / "run", quiet)
    losses = [line["loss"] for line in metrics(tmp_path / "run")]
    corpus = embedded_corpus()
    # 2.57 of 3.15 nats were reached where the curve was stored; other releases of Python have similar text.
    assert means(losses)[-1] < unigram_entropy(corpus) - 0.3
    if corpus.header.fingerprint != stored["corpus"]:
        pytest.skip(f"the stored curve is of Python {stored['python']}, whose embedded corpus is another")
    # The same run with AVX2 and SSE in place of AVX-512 differs by 1e-5 in the first steps; then a rounding flips
    # a router's choice here and there, and single steps differ by up to 0.09, means of twenty by up to 0.014.
    assert losses[:20] == pytest.approx(stored["loss"][:20], abs=1e-3)
    assert means(losses) == pytest.approx(means(stored["loss"]), abs=0.05)


# Runs in a process of their own


@pytest.fixture(scope="module")
def start() -> Callable[..., BaseProcess]:
    """Processes forked from one that has imported torch and computed nothing: fresh, and there at once.

    Building a model imports torch._dynamo, which would be most of a short life.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["threefold.engine.train", "torch._dynamo"])

    def begin(fields: dict[str, Any], folder: Path, said: Path) -> BaseProcess:
        process = context.Process(target=run_to_the_end, args=(fields, folder, said))
        process.start()
        return process

    return begin


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def wait_for(ready: Callable[[], bool], process: BaseProcess) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not ready():
        assert process.exitcode is None, f"ended with {process.exitcode}"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_sigterm_saves_and_ends_well(start: Callable[..., BaseProcess], data: dict[str, Any], tmp_path: Path) -> None:
    folder, said = tmp_path / "run", tmp_path / "said"
    fields = {**data, "job.steps": LONG}
    reached = 0
    for _ in range(2):
        process = start(fields, folder, said)
        wait_for(lambda least=reached + 3: len(lines_of(folder / METRICS)) >= least, process)
        os.kill(process.pid, signal.SIGTERM)
        process.join(HANG_SECONDS)
        assert process.exitcode == 0
        last = checkpoints(folder).steps()[-1]
        assert last > reached
        assert [line["step"] for line in metrics(folder)] == list(range(1, last + 1))
        assert newest(folder)[1]["step"] == last
        assert f"stopping after step {last}, saving" in lines_of(said)
        if reached:
            assert f"resuming after step {reached} of {LONG}" in lines_of(said)
        reached = last


def test_a_signal_between_asking_and_agreeing_is_not_lost(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks compare what they were asked when the signal comes: the run stops one step later, not never."""
    compare, calls = train_module.all_reduce, []

    def interrupted(asked: Tensor, group: Any, how: str) -> Any:
        calls.append(int(asked))
        if len(calls) == 3:
            signal.raise_signal(signal.SIGTERM)
        return compare(asked, group, how)

    monkeypatch.setattr(train_module, "all_reduce", interrupted)
    trainer = train(tiny_plan({**data, "job.steps": 8}), tmp_path / "run", quiet)
    assert calls == [0, 0, 0, 1]
    assert (trainer.stopping, trainer.step) == (True, 3)
    assert newest(tmp_path / "run")[1]["step"] == 3


class Killings:
    """Starts a run, kills it at a random moment, starts it again, until it ends by itself; and checks every restart."""

    def __init__(self, start: Callable[..., BaseProcess], fields: dict[str, Any], folder: Path, seed: int) -> None:
        self.start, self.fields, self.folder, self.draw = start, fields, folder, random.Random(seed)
        self.num_kills = self.num_resumed = 0

    def one_run(self, name: str, life_seconds: float, most: int) -> Path:
        folder, said = self.folder / name, self.folder / f"{name}.said"
        while True:
            said.unlink(missing_ok=True)
            steps = checkpoints(folder).steps()
            process = self.start(self.fields, folder, said)
            process.join(self.draw.uniform(0, life_seconds) if self.num_kills < most else HANG_SECONDS)
            if process.exitcode is None:
                os.kill(process.pid, signal.SIGKILL)
                process.join()
                self.num_kills += 1
            killed = process.exitcode == -signal.SIGKILL
            assert killed or process.exitcode == 0, f"ended with {process.exitcode}: {lines_of(said)}"
            self._check_start(lines_of(said), steps)
            if not killed:
                return folder

    def _check_start(self, said: list[str], steps: list[int]) -> None:
        said = [line for line in said if not line.startswith(("CPU threads", "starting from random weights"))]
        assert all(line.startswith("resuming") for line in said), said
        if said:
            assert said == [f"resuming after step {steps[-1]} of {self.fields['job.steps']}"]
            self.num_resumed += 1


@pytest.mark.parametrize(
    ("kills", "extra"),
    [(3, {}), pytest.param(50, DEEPSEEK, marks=[pytest.mark.slow, pytest.mark.timeout(6000)])],
    ids=["three", "fifty"],
)
def test_a_killed_run_ends_like_an_uninterrupted_one(
    kills: int, extra: dict[str, Any], start: Callable[..., BaseProcess], data: dict[str, Any], tmp_path: Path
) -> None:
    seed = int(os.environ.get("KILL_SEED", time.time_ns()))
    print(f"KILL_SEED={seed}")
    fields = {**data, **extra, "job.steps": 16, "run.save_every": 1, "run.keep": 2}
    whole = tmp_path / "whole"
    process = start(fields, whole, tmp_path / "whole.said")
    began = time.monotonic()
    process.join()
    assert process.exitcode == 0
    life = time.monotonic() - began
    tensors, facts = newest(whole)
    killings = Killings(start, fields, tmp_path, seed)
    runs = 0
    while killings.num_kills < kills:
        folder = killings.one_run(f"killed-{runs}", life / 2, kills)
        again, told = newest(folder)
        assert differing(tensors, again) == []
        assert told == facts
        assert metrics(folder) == metrics(whole)
        shutil.rmtree(folder)
        runs += 1
    print(f"{killings.num_kills} kills in {runs} runs, {killings.num_resumed} starts resumed")
