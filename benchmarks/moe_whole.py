"""A whole MoE layer with its router: our module against the same layer in torch, compiled; and what the host does.

`moe_layer.py --router` runs it. All sides start at the tokens: router, choice, sorting, experts, and the gradients of
input, router and experts. Ours also gives the loads and the entropy that a training step logs; one side of ours has the
balancing losses too. The layers in torch have the router of Hugging Face's Qwen3-MoE and grouped_mm experts.

`ms` is the time where sides take turns, as in `moe_layer.py`, and `alone_ms` that of runs of one side in a row, in
which the host cannot run ahead while another side keeps the GPU busy. The host's time is that of a layer of as many
experts with `HOST_SIZES`, which leave the GPU idle most of the time. Launches are kernels, fills and copies of one
forward and backward, counted by torch's profiler; ops are calls that reach torch's dispatcher from Python and autograd,
which can be counted on any device.

Shapes: T tokens, K experts of a token, D model dim, E experts, H expert dim, X = 2 H.
"""

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from moe_peers import Side
from moe_torch import gathered_layer, grouped_layer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from threefold.engine.model_options import Options
from threefold.engine.moe.layer import MoeLayer
from threefold.spec.model import MoeSpec

HOST_SIZES = {"num_tokens": 128, "dim": 256, "expert_dim": 128}  # so small that the GPU waits for the host
LOSSES = {"threefold": {}, "threefold, losses": {"aux_loss": 1e-3, "z_loss": 1e-3}}
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemsetAsync", "cudaMemcpyAsync")
Expert = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def routed(experts: Expert, top_k: int, x_TD: Tensor, gate_ED: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The layer of Hugging Face's Qwen3-MoE: logits in bf16, softmax in fp32, weights divided by their sum."""
    score_TE = torch.nn.functional.linear(x_TD, gate_ED).softmax(dim=-1, dtype=torch.float32)
    weight_TK, expert_TK = score_TE.topk(top_k, dim=-1)
    return experts(x_TD, weight_TK / weight_TK.sum(dim=-1, keepdim=True), expert_TK, gate_up, down)


def whole_sides(case: Any, device: torch.device, compiled: bool = True) -> dict[str, Side]:
    """Sides by name, those of torch if `compiled`; all share their weights."""
    spec = MoeSpec(case.num_experts, case.top_k, case.expert_dim)
    layers = {name: _our_layer(spec, case.dim, device, losses) for name, losses in LOSSES.items()}
    first = layers["threefold"]
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in first.parameters():
            weight.normal_(std=weight.shape[-1] ** -0.5)
    for layer in layers.values():
        layer.router.weight, layer.experts.gate_up, layer.experts.down = first.parameters()
    x_TD = torch.randn(case.num_tokens, case.dim, device=device, dtype=torch.bfloat16, requires_grad=True)
    wanted = [x_TD, *first.parameters()]
    sides = {name: Side(partial(_call, layer), [x_TD], wanted) for name, layer in layers.items()}
    for name, experts in (
        {"compiled": grouped_layer, "compiled, gathered": gathered_layer} if compiled else {}
    ).items():
        theirs = torch.compile(partial(routed, experts, case.top_k), dynamic=False)
        sides[name] = Side(theirs, list(wanted), wanted)
    return sides


def _our_layer(spec: MoeSpec, dim: int, device: torch.device, losses: dict[str, float]) -> MoeLayer:
    with torch.device(device):
        return MoeLayer(spec, dim, "silu", Options(expert_fusion=True, **losses)).to(torch.bfloat16)


def _call(layer: MoeLayer, x_TD: Tensor) -> Tensor | tuple[Tensor, ...]:
    y_BSD, stats = layer(x_TD[None])
    losses = tuple(stats.losses.values())
    return (y_BSD.flatten(0, 1), *losses) if losses else y_BSD.flatten(0, 1)


def both(side: Side, slope_TD: Tensor) -> object:
    """Forward and backward. Losses, where a side has them, get a gradient of one."""
    made: Any = side.forward()
    if isinstance(made, tuple):
        return torch.autograd.grad(made, side.wanted, [slope_TD, *(torch.ones_like(loss) for loss in made[1:])])
    return torch.autograd.grad(made, side.wanted, slope_TD)


def count_launches(side: Side, slope_TD: Tensor) -> dict[str, int]:
    """Kernels, fills and copies of one forward, and of forward and backward."""
    found = {}
    for name, call in {"forward": side.forward, "both": partial(both, side, slope_TD)}.items():
        call()
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            call()
            torch.cuda.synchronize()
        found[name] = sum(any(event.name.startswith(one) for one in LAUNCHES) for event in profile.events())
    return found


class _OpCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def count_ops(side: Side, slope_TD: Tensor) -> dict[str, int]:
    """Calls of torch's dispatcher in one forward and backward, by name: views and allocations among them."""
    with _OpCounter() as counter:
        both(side, slope_TD)
    return dict(counter.counts)


def host_seconds(call: Callable[[], object], repeats: int = 100) -> float:
    """Seconds that one call keeps the host, where the GPU has next to nothing to do."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    taken = time.perf_counter() - begin
    torch.cuda.synchronize()
    return taken / repeats
