"""Every fast path of the engine against the slow one beside it, gradients included.

Shapes: B batch, S sequence, H heads, T tokens, D model dim, V vocabulary, E experts, K experts of a token.
"""

import math
from itertools import product
from typing import Any

import pytest
import torch
from attention_reference import reference

from threefold.engine.attention.backend import attend
from threefold.engine.attention.gated_delta import delta_rule, delta_rule_by_token, short_conv
from threefold.engine.dispatch.local import LocalDispatcher
from threefold.engine.layers import cross_entropy as loss
from threefold.engine.layers.positions import Positions, document_bounds
from threefold.engine.model_options import Options
from threefold.engine.moe import balance
from threefold.engine.moe.experts import Experts, can_use_grouped_mm, gather_bias_rows
from threefold.engine.moe.layer import MoeLayer
from threefold.engine.moe.router import Router, Routing
from threefold.spec.model import MoeSpec

DOCUMENTS = torch.tensor([[0] * 5 + [1] * 1 + [2] * 7, [0] * 13])


pytestmark = pytest.mark.usefixtures("one_thread")


def leaf(*shape: int, dtype: Any = torch.float64) -> Any:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def same(found: Any, expected: Any, inputs: list[Any], tolerance: float = 1e-12) -> None:
    """Values and every input's gradient; fp64 leaves about 1e-15 of rounding."""
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    slope = torch.randn_like(found)
    pairs = zip(torch.autograd.grad(found, inputs, slope), torch.autograd.grad(expected, inputs, slope), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("window", "sinks", "packed"), [*product([None, 1, 3, 40], [False, True], [False, True])])
def test_attention_equals_eager(window: int | None, sinks: bool, packed: bool) -> None:
    q, k, v = leaf(2, 4, 13, 8), leaf(2, 2, 13, 8), leaf(2, 2, 13, 6)
    sink = leaf(4) if sinks else None
    asked = {"scale": 0.3, "window": window, "sinks": sink, "documents_BS": DOCUMENTS if packed else None}
    same(attend(q, k, v, **asked), reference(q, k, v, **asked), [q, k, v, *([sink] if sinks else [])])


def test_eager_attention_is_the_definition() -> None:
    """One query and head at a time, with the sink as one more logit."""
    q, k, v, sink = (leaf(*shape).detach() for shape in [(1, 2, 6, 4), (1, 1, 6, 4), (1, 1, 6, 4), (2,)])
    documents = torch.tensor([[0, 0, 1, 1, 1, 1]])
    found = reference(q, k, v, scale=0.5, window=3, sinks=sink, documents_BS=documents)
    for head, i in product(range(2), range(6)):
        seen = [j for j in range(6) if i - 3 < j <= i and documents[0, i] == documents[0, j]]
        logits = [math.exp(0.5 * float(q[0, head, i] @ k[0, 0, j])) for j in seen]
        total = sum(logits) + math.exp(float(sink[head]))
        expected = sum(w / total * v[0, 0, j] for w, j in zip(logits, seen, strict=True))
        torch.testing.assert_close(found[0, head, i], expected)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_chunked_delta_rule_equals_the_token_loop(chunk: int, packed: bool) -> None:
    q, k, v = leaf(2, 13, 3, 4), leaf(2, 13, 3, 4), leaf(2, 13, 3, 5)
    decay = (-3 * torch.rand(2, 13, 3, dtype=torch.float64)).requires_grad_()
    step = torch.rand(2, 13, 3, dtype=torch.float64).requires_grad_()
    documents = DOCUMENTS if packed else None
    inputs = [q, k, v, decay, step]
    same(delta_rule(*inputs, documents, chunk=chunk), delta_rule_by_token(*inputs, documents), inputs)


def test_delta_rule_and_convolution_forget_the_document_before() -> None:
    q, k, v = leaf(1, 13, 2, 4), leaf(1, 13, 2, 4), leaf(1, 13, 2, 4)
    decay, step = -torch.rand(1, 13, 2, dtype=torch.float64), torch.rand(1, 13, 2, dtype=torch.float64)
    together = delta_rule(q, k, v, decay, step, DOCUMENTS[:1], chunk=4)
    x, weight = leaf(1, 13, 6), leaf(6, 4)
    mixed = short_conv(x, weight, DOCUMENTS[:1])
    for part in (slice(0, 5), slice(5, 6), slice(6, 13)):
        alone = delta_rule_by_token(*(t[:, part] for t in (q, k, v, decay, step)))
        torch.testing.assert_close(together[:, part], alone)
        torch.testing.assert_close(mixed[:, part], short_conv(x[:, part], weight, None))


def test_a_strong_decay_stays_finite_in_fp32() -> None:
    """Over a chunk the decays multiply to exp(-2000): nothing may become inf or nan."""
    inputs = [leaf(1, 70, 1, 4, dtype=torch.float32) for _ in range(3)]
    decay = torch.full((1, 70, 1), -30.0, requires_grad=True)
    step = torch.full((1, 70, 1), 0.5, requires_grad=True)
    out = delta_rule(*inputs, decay, step)
    out.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in [*inputs, decay, step])
    torch.testing.assert_close(out, delta_rule_by_token(*inputs, decay, step), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_chunked_loss_equals_plain(chunk: int, ignored: str) -> None:
    x, weight = leaf(17, 6), leaf(11, 6)
    labels = torch.randint(0, 11, (17,))
    labels[{"none": slice(0), "some": slice(3, 9), "all": slice(None)}[ignored]] = loss.IGNORE
    same(loss.cross_entropy_sum(x, weight, labels, chunk), loss.reference(x, weight, labels), [x, weight])


@pytest.mark.parametrize("chunk", [5, 64])
def test_chunked_loss_of_capped_logits_equals_plain(chunk: int) -> None:
    """The cap is near the logits, so that its slope matters."""
    x, weight, labels = leaf(17, 6), leaf(11, 6), torch.randint(0, 11, (17,))
    labels[3:6] = loss.IGNORE
    found = loss.cross_entropy_sum(x, weight, labels, chunk, softcap=1.5)
    same(found, loss.reference(x, weight, labels, softcap=1.5), [x, weight])


def test_loss_of_tied_embeddings_sums_both_gradients() -> None:
    weight, tokens = leaf(11, 6), torch.randint(0, 11, (9,))
    labels = torch.randint(0, 11, (9,))
    found = loss.cross_entropy_sum(weight[tokens].tanh(), weight, labels, 4)
    same(found, loss.reference(weight[tokens].tanh(), weight, labels), [weight])


def test_loss_never_holds_all_logits() -> None:
    """2,000 tokens by 4,000 words would be 32 MB in fp32; a chunk of 100 tokens is 1.6 MB."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor):
                    self.seen = max(self.seen, tensor.numel())
            return out

    x, weight = leaf(2000, 4, dtype=torch.float32), leaf(4000, 4, dtype=torch.float32)
    with Largest() as largest:
        loss.cross_entropy_sum(x, weight, torch.randint(0, 4000, (2000,)), 100).backward()
    assert largest.seen == 100 * 4000


COUNTS = {"even": [4, 4, 4, 4], "empty experts": [0, 9, 0, 7], "one takes all": [0, 0, 16, 0], "no rows": [0, 0, 0, 0]}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("bias", "activation"), [(False, "silu"), (True, "clamped swiglu")])
def test_grouped_experts_equal_the_loop(counts: list[int], bias: bool, activation: str) -> None:
    experts = Experts(4, 8, 12, bias, activation)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=3.0)  # wide, so that the clamp is reached
    rows = sum(counts)
    x, weight = leaf(rows, 8, dtype=torch.float32), leaf(rows, dtype=torch.float32)
    outs = {}
    for backend in ("grouped", "loop"):
        experts.backend = backend
        outs[backend] = experts(x, weight, torch.tensor(counts))
    # fp32 sums in another order, of numbers up to about 1e3
    same(outs["grouped"], outs["loop"], [x, weight, *experts.parameters()], tolerance=1e-4)


def test_router_weight_before_fc2_is_the_weight_after_it() -> None:
    """Also with FC2's bias, which the weight scales too."""
    experts = Experts(2, 5, 3, bias=True, activation="clamped swiglu").double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x, weight, counts = leaf(7, 5), leaf(7), torch.tensor([3, 4])
    ones = torch.ones(7, dtype=torch.float64)
    same(experts(x, weight, counts), experts(x, ones, counts) * weight[:, None], [x, weight])


def test_gradient_of_a_bias_in_bf16_counts_every_row() -> None:
    """Ones added up in bf16 would stop at 256."""
    bias = leaf(3, 5, dtype=torch.bfloat16)
    gather_bias_rows(bias, torch.tensor([1000, 0, 24]), 1024).backward(torch.ones(1024, 5, dtype=torch.bfloat16))
    assert bias.grad[:, 0].tolist() == [1000, 0, 24]


def test_grouped_product_is_used_only_where_it_works() -> None:
    down = torch.empty(2, 8, 12)
    assert can_use_grouped_mm(torch.empty(3, 8), down)
    assert not can_use_grouped_mm(torch.empty(3, 8), torch.empty(2, 8, 13))
    assert not can_use_grouped_mm(torch.empty(3, 8, dtype=torch.float64), down.double())


def plain_moe(layer: MoeLayer, x_BSD: Any) -> Any:
    """Token by token, expert by expert."""
    x_TD = x_BSD.flatten(0, 1)
    routing = layer.router(x_TD)
    rows = []
    for t, x_D in enumerate(x_TD):
        total = torch.zeros_like(x_D)
        for weight, e in zip(routing.weight_TK[t], routing.expert_TK[t].tolist(), strict=True):
            gate, up = (layer.experts.gate_up[e] @ x_D).chunk(2)
            total = total + weight * (layer.experts.down[e] @ (torch.nn.functional.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows).view_as(x_BSD)


def moe_layer(options: Options, **changes: Any) -> MoeLayer:
    spec = MoeSpec(**{"num_experts": 6, "top_k": 2, "expert_dim": 8, **changes})
    layer = MoeLayer(spec, 8, "silu", options).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def test_layer_equals_token_by_token() -> None:
    layer, x = moe_layer(Options()), leaf(2, 7, 8)
    found, _ = layer(x)
    same(found, plain_moe(layer, x), [x, *layer.parameters()])


@pytest.mark.parametrize("factor", [6.0, 65_536.0])
def test_enough_capacity_drops_nothing(factor: float) -> None:
    layer, x = moe_layer(Options(capacity_factor=factor)), leaf(2, 7, 8)
    found, measured = layer(x)
    assert int(measured.num_dropped) == 0
    same(found, plain_moe(layer, x), [x, *layer.parameters()])


def test_capacity_keeps_the_heaviest_tokens_of_each_expert() -> None:
    layer, x = moe_layer(Options(capacity_factor=0.5)), leaf(2, 7, 8)
    found, measured = layer(x)
    routing = layer.router(x.flatten(0, 1))
    capacity = math.ceil(14 * 2 / 6 * 0.5)
    kept = torch.zeros_like(routing.weight_TK)
    for e in range(6):
        copies = [
            (-routing.weight_TK[t, k].item(), t, k)
            for t, k in product(range(14), range(2))
            if routing.expert_TK[t, k] == e
        ]
        for _, t, k in sorted(copies)[:capacity]:
            kept[t, k] = 1
    assert int(measured.num_dropped) == 28 - int(kept.sum()) > 0
    route = layer.router.forward
    layer.router.forward = lambda x_TD: Routing(route(x_TD).weight_TK * kept, routing.expert_TK, None, None)
    same(found, plain_moe(layer, x), [x, *layer.parameters()])


def test_dispatch_is_stable_and_repeats_bit_for_bit() -> None:
    dispatcher = LocalDispatcher(3)
    expert, weight = torch.tensor([[2, 0], [0, 2], [2, 0]]), torch.rand(3, 2)
    x, w, count, _, state = dispatcher.dispatch(torch.arange(3.0)[:, None], expert, weight)
    assert x[:, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert count.tolist() == [3, 0, 3]
    assert torch.equal(w, weight.flatten()[torch.tensor([1, 2, 5, 0, 3, 4])])
    assert torch.equal(dispatcher.combine(x, state), 2 * torch.arange(3.0)[:, None])


def test_forced_balance_gives_every_expert_the_same() -> None:
    layer = moe_layer(Options(forced_balance=True))
    _, measured = layer(leaf(2, 6, 8))
    assert measured.load_E.tolist() == [4] * 6


def test_balancing_losses_are_their_formulas() -> None:
    logits = torch.randn(2 * 5, 4, dtype=torch.float64)
    scores = logits.sigmoid()
    expert = scores.topk(2, dim=-1).indices
    routing = Routing(scores.gather(1, expert), expert, logits, scores)
    share = scores / scores.sum(dim=1, keepdim=True)

    def formula(rows: range) -> float:
        load = [sum(int(e in expert[t].tolist()) for t in rows) / (2 * len(rows)) for e in range(4)]
        return 4 * sum(load[e] * sum(float(share[t, e]) for t in rows) / len(rows) for e in range(4))

    assert float(balance.aux_loss(routing)) == pytest.approx(formula(range(10)))
    by_sequence = (formula(range(5)) + formula(range(5, 10))) / 2
    assert float(balance.seq_aux_loss(routing, 2)) == pytest.approx(by_sequence)
    squares = [math.log(sum(math.exp(z) for z in row)) ** 2 for row in logits.tolist()]
    assert float(balance.z_loss(routing)) == pytest.approx(sum(squares) / 10)


def test_bias_moves_towards_idle_experts_and_leaves_weights_alone() -> None:
    spec = MoeSpec(4, 2, 8, score="sigmoid", balance_bias=True)
    router = Router(spec, 8)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(50, 8)
    before = router(x)
    balance.update_bias([router], torch.tensor([[10, 30, 20, 20]]), rate=0.5)
    assert router.balance_bias.tolist() == [0.5, -0.5, 0.0, 0.0]
    after = router(x)
    assert (after.expert_TK == 0).sum() > (before.expert_TK == 0).sum()
    chosen = after.scores_TE.gather(1, after.expert_TK)
    torch.testing.assert_close(after.weight_TK, chosen / chosen.sum(dim=1, keepdim=True))
    assert not router.balance_bias.requires_grad


def test_health_names_idle_and_busy_experts() -> None:
    loads = torch.tensor([[4, 0, 8], [4, 4, 4]])
    metrics = balance.router_metrics(loads, torch.tensor([3, 0]), torch.tensor([1.0, 0.5]), [])
    assert metrics["router/load_max"] == 2.0
    assert metrics["router/load_min"] == 0.0
    assert metrics["router/idle_experts"] == 1
    assert metrics["router/dropped"] == 3 / 24
    assert metrics["router/entropy"] == 0.75


def test_attached_loss_gets_its_gradient() -> None:
    x, y = leaf(3), leaf(2)
    balance.attach_loss(x, y.square().sum()).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert torch.equal(y.grad, 2 * y)


def test_positions_start_anew_with_each_document() -> None:
    places = Positions.from_tokens(DOCUMENTS, DOCUMENTS)
    assert places.positions_BS.tolist() == [[0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5, 6], list(range(13))]
    bounds = document_bounds(DOCUMENTS)
    assert bounds.cu_seqlens.tolist() == [0, 5, 6, 13, 26]
    assert bounds.max_seqlen == 13


def test_recompute_gives_the_same_bits() -> None:
    from torch.utils.checkpoint import checkpoint

    layer, x = moe_layer(Options()), leaf(2, 7, 8)
    grads = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        out, _ = run(x)
        grads.append(torch.autograd.grad(out.square().sum(), [x, *layer.parameters()]))
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
