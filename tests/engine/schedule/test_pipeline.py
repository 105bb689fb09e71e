"""Pipelines against one rank in fp64, on forked gloo ranks."""

import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining.schedules import OVERLAP_F_B
from torch.utils.checkpoint import checkpoint

from threefold.engine.autograd.delayed_wgrad import WgradQueue
from threefold.engine.autograd.linear import grouped_gemm, linear, use_main_grad_linears
from threefold.engine.dist import collectives
from threefold.engine.dist.mesh import TRIVIAL_GROUP, Group, Mesh
from threefold.engine.moe.balance import attach_loss
from threefold.engine.schedule.p2p import P2PChannel
from threefold.engine.schedule.pipeline import Pipeline
from threefold.engine.schedule.pipeline_order import pipeline_actions
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.findings import FindingsError
from threefold.layout.degrees import Layout
from threefold.layout.stages import chunk_rank

DIM, WIDE, VOCAB, SHAPE = 4, 6, 7, (2, 3)
TIGHT = 1e-12  # fp64 sums of tens of terms of size one, in another order
SPLIT = ("zero-bubble", "dualpipev")


class _Column(torch.autograd.Function):
    """x @ w, where each rank has columns of w: a weight and a collective in one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, group: Group) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.group = group
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        dx = grad @ w.t()
        collectives.all_reduce(dx, ctx.group).wait()
        return dx, x.flatten(0, 1).t() @ grad.flatten(0, 1), None


class _Row(torch.autograd.Function):
    """x @ w, where each rank has rows of w."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, group: Group) -> Tensor:
        ctx.save_for_backward(x, w)
        out = x @ w
        collectives.all_reduce(out, group).wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.flatten(0, 1).t() @ grad.flatten(0, 1), None


def _parameter(seed: int, *shape: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(*shape, dtype=torch.float64, generator=generator) / 2)


class Layer(nn.Module):
    """A GEMM sharded over the group (one all-reduce in each direction), a local one, and an auxiliary loss."""

    def __init__(self, seed: int, group: Group) -> None:
        super().__init__()
        self.group = group
        mine = slice(group.rank * WIDE // group.size, (group.rank + 1) * WIDE // group.size)
        self.up = nn.Parameter(_parameter(seed, DIM, WIDE).data[:, mine].clone())
        self.down = nn.Parameter(_parameter(seed + 1, WIDE, DIM).data[mine].clone())
        self.whole = nn.Linear(DIM, DIM, dtype=torch.float64)
        self.whole.weight, self.whole.bias = _parameter(seed + 2, DIM, DIM), _parameter(seed + 3, DIM)
        self.gate = _parameter(seed + 4, 1, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = attach_loss(x, 0.01 * linear(x, self.gate).square().mean())
        x = x + _Row.apply(F.silu(_Column.apply(x, self.up, self.group)), self.down, self.group)
        return x + self.whole(x)


class ToyChunk(nn.Module):
    """The chunk that a string describes: E embedding, t layer, L loss; an empty string passes its input on."""

    def __init__(self, text: str, first: int, group: Group, tokens: Tensor) -> None:
        super().__init__()
        self.tokens, self.losses = tokens, {}
        self.embedding = _parameter(1, VOCAB, DIM) if "E" in text else None
        self.layers = nn.ModuleList(Layer(10 * (first + n + 1), group) for n in range(text.count("t")))
        self.head = _parameter(2, VOCAB, DIM) if "L" in text else None
        use_main_grad_linears(self)

    def forward(self, x: Tensor | None, microbatch: int) -> Tensor:
        if self.embedding is not None:
            assert x is None
            x = F.embedding(self.tokens[microbatch], self.embedding)
        for layer in self.layers:
            x = layer(x)
        if self.head is None:
            return x
        logits = linear(x, self.head).flatten(0, 1)
        loss = F.cross_entropy(logits, self.tokens[microbatch].flatten()) / len(self.tokens)
        self.losses[microbatch] = loss.item()
        return loss


def _chunks(texts: list[str], group: Group, count: int, wanted: list[int]) -> dict[int, ToyChunk]:
    tokens = torch.randint(VOCAB, (count, *SHAPE), generator=torch.Generator().manual_seed(3))
    firsts = [sum(text.count("t") for text in texts[:n]) for n in range(len(texts))]
    return {n: ToyChunk(texts[n], firsts[n], group, tokens) for n in wanted}


def _serial(texts: list[str], count: int) -> tuple[dict[int, ToyChunk], dict[int, float]]:
    chunks = _chunks(texts, TRIVIAL_GROUP, count, list(range(len(texts))))
    for microbatch in range(count):
        x = None
        for chunk in chunks.values():
            x = chunk(x, microbatch)
        x.backward()
    return chunks, chunks[len(texts) - 1].losses


def _error(mine: ToyChunk, whole: ToyChunk, group: Group) -> float:
    """The largest difference of a gradient from the part of the whole that it should be, relative to its tensor."""
    worst = 0.0
    for (name, p), (_, q) in zip(mine.named_parameters(), whole.named_parameters(), strict=True):
        expected = q.grad
        if name.endswith((".up", ".down")):
            expected = expected.chunk(group.size, dim=-1 if name.endswith(".up") else 0)[group.rank]
        worst = max(worst, ((p.grad - expected).abs().max() / expected.abs().max()).item())
    return worst


def _train(
    rank: int,
    pp: int,
    num_shares: int,
    schedule: str,
    texts: list[str],
    counts: list[int],
    delay: bool = True,
    how: Any = None,
) -> list[dict]:
    """Evaluate, train, evaluate and train a second time; the results of one rank of pp x tp."""
    mesh = Mesh(Layout(gpus=num_shares * pp, tp=num_shares, pp=pp), rank)
    stage, tp = mesh.group("pp"), mesh.group("tp")
    mine = [n for n in range(len(texts)) if chunk_rank(n, pp, schedule == "dualpipev") == stage.rank]
    found = []
    for count in counts:
        chunks = _chunks(texts, tp, count, mine)
        pipeline = Pipeline(
            chunks, len(texts), stage, schedule, count, lambda n: (*SHAPE, DIM), torch.float64, mesh.device, delay
        )
        if how is not None:
            how(pipeline)
        calls: Counter[str] = Counter()
        fires: Counter[tuple[int, str]] = Counter()
        for n, chunk in chunks.items():
            for name, p in chunk.named_parameters():
                p.register_post_accumulate_grad_hook(lambda _, key=(n, name), fires=fires: fires.update([key]))
        whole, losses = _serial(texts, count)
        errors = []
        for _ in range(2):
            pipeline.run(train=False)
            grads = [p.grad for chunk in chunks.values() for p in chunk.parameters()]
            errors.append(0.0 if all(grad is None for grad in grads) else float("inf"))
            calls.clear()
            fires.clear()
            with collectives.observe_collectives(lambda call, calls=calls: calls.update([call.group.name])):
                pipeline.run()
            errors += [_error(chunks[n], whole[n], tp) for n in mine]
            for chunk in chunks.values():
                chunk.zero_grad()
                if chunk.head is not None:
                    errors += [abs(chunk.losses[n] - loss) for n, loss in losses.items()]
                    chunk.losses.clear()
        layers = sum(len(chunk.layers) for chunk in chunks.values())
        found.append({"error": max(errors), "calls": dict(calls), "layers": layers, "fires": set(fires.values())})
    return found


CASES = [
    # schedule, pp, tp, chunks, microbatches
    ("1f1b", 2, 2, ["Et", "ttL"], [1, 4, 7]),
    ("1f1b", 4, 1, ["Et", "", "tt", "L"], [3, 8]),
    ("interleaved", 2, 2, ["E", "tt", "", "tL"], [2, 8]),
    ("interleaved", 2, 1, ["E", "t", "t", "", "t", "L"], [4]),
    ("interleaved", 4, 1, ["E", "t", "tt", "", "t", "", "t", "L"], [4, 10]),
    ("zero-bubble", 2, 2, ["Et", "ttL"], [1, 5, 8]),
    ("zero-bubble", 2, 2, ["E", "tt", "", "tL"], [2, 8]),
    ("zero-bubble", 4, 1, ["Et", "", "tt", "L"], [3, 9]),
    ("zero-bubble", 4, 1, ["E", "t", "tt", "", "t", "", "t", "L"], [4, 12]),
    ("dualpipev", 2, 2, ["E", "tt", "", "tL"], [4, 7]),
    ("dualpipev", 3, 1, ["Et", "t", "t", "", "tt", "L"], [6]),
    ("dualpipev", 4, 1, ["E", "t", "tt", "", "t", "", "t", "L"], [8, 9]),
]


def _check(found: list[list[dict]], counts: list[int], tp: int) -> None:
    """Gradients are right, each layer's two collectives ran once a microbatch, each hook once, whatever is split."""
    for of_rank in found:
        for count, one in zip(counts, of_rank, strict=True):
            assert one["error"] < TIGHT
            assert one["calls"].get("tp", 0) == (2 * one["layers"] * count if tp > 1 else 0)
            assert one["fires"] <= {count}


@pytest.mark.parametrize(("schedule", "pp", "tp", "texts", "counts"), CASES)
def test_gradients_are_those_of_one_rank(schedule: str, pp: int, tp: int, texts: list[str], counts: list[int]) -> None:
    _check(run_ranks(tp * pp, _train, pp, tp, schedule, texts, counts), counts, tp)


@pytest.mark.parametrize("schedule", SPLIT)
def test_split_without_delay(schedule: str) -> None:
    _check(run_ranks(4, _train, 2, 2, schedule, ["E", "tt", "", "tL"], [4], False), [4], 2)


def _merge(pipeline: Pipeline) -> None:
    stages = {stage.stage_index: stage for stage in pipeline.stages}

    def merged(action: Any, context: Any) -> None:
        (to, _, ahead, _), (back, _, behind, _) = action.sub_actions
        y = stages[to].forward_one_chunk(ahead)
        if to + 1 in stages:
            stages[to + 1].set_local_fwd_input(y, ahead)
        stages[back].backward_one_chunk(behind)
        if back - 1 in stages:
            stages[back - 1].set_local_bwd_input(stages[back].get_local_bwd_output(behind), behind)

    pipeline.runtime.register_custom_function(OVERLAP_F_B, merged)


def test_forward_and_backward_can_be_merged() -> None:
    """A custom function runs a forward and a backward as one action, as the overlapped schedule does."""
    _check(run_ranks(2, _train, 2, 1, "dualpipev", ["E", "tt", "", "tL"], [6], True, _merge), [6], 1)


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble", "dualpipev"])
def test_many_microbatches_do_not_hang(schedule: str, pp: int) -> None:
    for vpp in {"1f1b": [1], "interleaved": [2, 4], "zero-bubble": [1, 2, 3], "dualpipev": [2]}[schedule]:
        texts = ["E", *["t"] * (pp * vpp - 2), "L"]
        _check(run_ranks(2 * pp, _train, pp, 2, schedule, texts, [2 * pp, 16 * pp]), [2 * pp, 16 * pp], 2)


def _sends(rank: int, pp: int, schedule: str, num_chunks: int, train: bool) -> tuple[Any, Any]:
    mesh = Mesh(Layout(gpus=pp, pp=pp), rank)
    group, made = mesh.group("pp"), Counter()
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))

    def chunk(n: int) -> Callable[[Tensor | None, int], Tensor]:
        def run(x: Tensor | None, microbatch: int) -> Tensor:
            x = torch.ones(n + 1, 8, dtype=torch.bfloat16) if x is None else x
            y = (x.sum() * weight).expand(n + 2, 8)  # not contiguous, and so is its gradient
            return y.sum() if n == num_chunks - 1 else y

        return run

    chunks = {n: chunk(n) for n in range(num_chunks) if chunk_rank(n, pp, schedule == "dualpipev") == rank}
    pipeline = Pipeline(chunks, num_chunks, group, schedule, 2 * pp, lambda n: (n + 2, 8), torch.bfloat16, mesh.device)
    real = dist.isend

    def counting(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        made[x.numel() * x.element_size()] += 1
        return real(x, *args, **kwargs)

    dist.isend = counting
    pipeline.run(train)
    said: Counter[int] = Counter()
    for num_bytes, count in pipeline.traffic(train):
        said[num_bytes] += count
    return made, said


@pytest.mark.parametrize("train", [True, False])
def test_traffic_is_what_is_sent(train: bool) -> None:
    """Hidden states of (n + 2) x 8 in bf16, so that each boundary has its own size; by hand for two ranks."""
    interleaved = run_ranks(2, _sends, 2, "interleaved", 4, train)
    v_shaped = run_ranks(2, _sends, 2, "dualpipev", 4, train)
    for made, said in interleaved + v_shaped:
        assert made == said
    back = 4 if train else 0
    assert interleaved[0][0] == Counter({32: 4, 48: back, 64: 4}) - Counter()
    assert interleaved[1][0] == Counter({32: back, 48: 4, 64: back}) - Counter()
    assert v_shaped[0][0] == Counter({32: 4, 64: back}) - Counter()  # chunk 3 is here, its gradient goes to chunk 2
    assert v_shaped[1][0] == Counter({32: back, 64: 4}) - Counter()  # chunk 1 hands over to 2, on this rank


def test_one_rank_needs_no_group() -> None:
    whole, losses = _serial(["EttL"], 3)
    chunks = _chunks(["EttL"], TRIVIAL_GROUP, 3, [0])
    Pipeline(chunks, 1, TRIVIAL_GROUP, "1f1b", 3, lambda n: (), torch.float64, torch.device("cpu")).run()
    assert _error(chunks[0], whole[0], TRIVIAL_GROUP) == 0.0
    assert chunks[0].losses == losses


def _span(schedule: str, pp: int, vpp: int, count: int) -> int:
    """Time until all is done, where forward, input and weight gradients of a chunk take one unit each."""
    todo = {rank: [a for a in actions if a] for rank, actions in pipeline_actions(schedule, pp, vpp, count).items()}
    cost = {"F": 1, "I": 1, "W": 1, "B": 2}
    ended: dict[tuple[str, int, int], int] = {}
    clock = dict.fromkeys(todo, 0)
    while any(todo.values()):
        for rank, actions in todo.items():
            if not actions:
                continue
            kind, chunk, microbatch = actions[0].computation_type.value, actions[0].stage_index, actions[0][2]
            needs = {"F": ("F", chunk - 1), "W": ("I", chunk)}.get(kind, ("I", chunk + 1))
            free = (kind == "F" and chunk == 0) or (kind in "IB" and chunk == pp * vpp - 1)
            if not free and (*needs, microbatch) not in ended:
                continue
            start = max(clock[rank], 0 if free else ended[*needs, microbatch])
            clock[rank] = start + cost[kind]
            ended["I" if kind == "B" else kind, chunk, microbatch] = clock[rank]
            actions.pop(0)
    return max(clock.values())


@pytest.mark.parametrize(("pp", "count"), [(2, 4), (4, 8), (4, 13), (8, 24)])
def test_zero_bubble_idles_a_third(pp: int, count: int) -> None:
    """arXiv 2401.10241, table 2: (p - 1)(F + B + W) idle for 1F1B, (p - 1)(F + B - W) for ZB-H1."""
    assert _span("1f1b", pp, 1, count) == 3 * count + 3 * (pp - 1)
    assert _span("zero-bubble", pp, 1, count) == 3 * count + (pp - 1)


@pytest.mark.parametrize(
    ("schedule", "vpp", "count"), [("interleaved", 2, 9), ("zero-bubble", 2, 9), ("dualpipev", 2, 7)]
)
def test_microbatches_that_fit_no_rounds(schedule: str, vpp: int, count: int) -> None:
    with pytest.raises(FindingsError, match="interleaved-fills-pipeline"):
        pipeline_actions(schedule, 4, vpp, count)


def _wrong(rank: int) -> str:
    mesh = Mesh(Layout(gpus=2, pp=2), rank)
    chunks = {rank: lambda x, n: torch.ones(3, requires_grad=True) if x is None else x.sum()}
    pipeline = Pipeline(chunks, 2, mesh.group("pp"), "1f1b", 2, lambda n: (2,), torch.float32, mesh.device)
    if rank == 0:
        with pytest.raises(ValueError, match="activation of chunk 0") as caught:
            pipeline.run()
        return str(caught.value)
    return ""


def test_wrong_shapes_are_not_sent() -> None:
    assert "(3,) torch.float32 is not the agreed (2,) torch.float32" in run_ranks(2, _wrong)[0]


class TestDelay:
    """Delayed weight gradients against autograd's own."""

    @staticmethod
    def both(run: Callable[[Tensor], Tensor], *weights: nn.Parameter) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Compare gradients of autograd with delayed ones; only the weight gradients may be delayed."""
        grads, inputs = [], []
        for delay in (None, WgradQueue()):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
            with delay or nullcontext():
                loss = run(x).square().sum()
                torch.autograd.backward(get_gradient_edge(loss), torch.ones(()))
            if delay is not None:
                assert all(w.grad is None for w in weights)
                delay.finish()
            grads.append([w.grad for w in weights])
            inputs.append(x.grad)
            for w in weights:
                w.grad = None
        return grads[0], grads[1], inputs[0] - inputs[1]

    def check(self, run: Callable[[Tensor], Tensor], *weights: nn.Parameter) -> None:
        fires: Counter[int] = Counter()
        for n, w in enumerate(weights):
            w.register_post_accumulate_grad_hook(lambda _, n=n: fires.update([n]))
        expected, found, dx = self.both(run, *weights)
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b)
        assert dx.abs().max() < 1e-5  # fp32 sums of a few terms in another order
        assert set(fires.values()) == {2}  # once without, once with delay

    def test_linear(self) -> None:
        w, bias = nn.Parameter(torch.randn(5, 4)), torch.randn(5, requires_grad=True)
        self.check(lambda x: linear(x.view(2, 3, 4), w, bias), w)

    def test_weight_used_twice(self) -> None:
        w = nn.Parameter(torch.randn(4, 4))
        self.check(lambda x: linear(linear(x, w).relu(), w), w)

    def test_views(self) -> None:
        w = nn.Parameter(torch.randn(2, 4, 4))
        self.check(lambda x: torch.cat([linear(part, one) for part, one in zip(x.split([2, 4]), w, strict=True)]), w)

    def test_grouped(self) -> None:
        w, ends = nn.Parameter(torch.randn(3, 8, 4)), torch.tensor([2, 2, 6], dtype=torch.int32)
        self.check(lambda x: grouped_gemm(x, w.transpose(-2, -1), ends), w)

    def test_recompute_runs_once(self) -> None:
        w, runs = nn.Parameter(torch.randn(4, 4)), []

        def layer(x: Tensor) -> Tensor:
            runs.append(1)
            return linear(x, w).sigmoid()

        self.check(lambda x: checkpoint(layer, x, use_reentrant=False), w)
        assert len(runs) == 4  # forward and recompute, without and with delay

    def test_the_gradient_of_one_parameter_at_a_time(self) -> None:
        """Each gradient is delivered before the next one is computed, and its inputs are freed."""
        first, second, delay = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(2, 4, 4)), WgradQueue()
        said: list[str] = []
        first.register_post_accumulate_grad_hook(lambda _: said.append("first"))
        second.register_post_accumulate_grad_hook(lambda _: said.append("second"))

        def made(given: Tensor) -> Tensor:
            said.append(f"made of {sum(there() is not None for there in inputs)}")
            return given

        kept = [torch.ones(4, 4) for _ in range(3)]
        inputs = [weakref.ref(each) for each in kept]
        views = [second[0], first, second[1]]
        delay.pending = [(view, partial(made, each)) for view, each in zip(views, kept, strict=True)]
        del kept
        delay.finish()
        assert said == ["made of 3", "made of 3", "second", "made of 1", "first"]
        assert torch.equal(second.grad, torch.ones(2, 4, 4))

    def test_a_gradient_that_waited_is_not_copied(self) -> None:
        weight, delay, made = nn.Parameter(torch.randn(4, 4)), WgradQueue(), []

        def compute() -> Tensor:
            grad = torch.ones(4, 4)
            made.append(grad.data_ptr())
            return grad

        delay.pending = [(weight, compute)]
        delay.finish()
        assert weight.grad is not None
        assert [weight.grad.data_ptr()] == made

    def test_what_is_not_a_parameter_does_not_wait(self) -> None:
        """A gathered or cast weight has a backward of its own, perhaps with a collective."""
        w, delay = nn.Parameter(torch.randn(4, 4)), WgradQueue()
        with delay:
            linear(torch.randn(2, 4, requires_grad=True), w * 1.0).sum().backward()
        assert w.grad is not None
        assert not delay.pending


class _Sent:
    """The handle of a send that has completed."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None: ...


def test_a_channel_frees_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A completed send frees its tensor at the next send, not only at the end of the run."""
    monkeypatch.setattr(dist, "isend", lambda x, group, group_dst: _Sent())
    group = Group("pp", (0, 1, 2, 3), 0, None)
    channel = P2PChannel("hidden states", (4,), torch.float32, torch.device("cpu"), group, 1, lambda text: None)
    sent = [torch.zeros(4) for _ in range(3)]
    alive = [weakref.ref(x) for x in sent]
    while sent:
        channel.send(sent.pop(0))
    assert [x() is not None for x in alive] == [False, False, True]
