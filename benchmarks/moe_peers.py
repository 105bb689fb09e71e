"""The MoE layers of other libraries as sides of `moe_layer.py`. The tokens' experts and weights are given: nobody's
router runs, everybody sorts by expert. A library that is not here, or does not run, is named with the reason.

SonicMoE searches all tiles of quack's kernels by itself, which takes minutes where they are not compiled yet
(`sonicmoe, its search`). Beside that it gets those of two or three tiles a product that make the whole layer fastest.

Shapes: T tokens, K experts of a token, R rows, D model dim, E experts, H expert dim, X = 2 H.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from threefold.engine.kernels.experts.kernel_choice import STEPS, cute_candidates
from threefold.engine.kernels.launch_config import CuteConfig

_GROUP = CuteConfig().group  # SonicMoE takes tiles in quack's own order
Tiles = dict[str, CuteConfig]
Clock = Callable[[dict[str, Callable[[], object]]], dict[str, float]]  # calls -> milliseconds of each


@dataclass(frozen=True)
class Side:
    layer: Callable[..., Tensor]
    arguments: list[Any]
    wanted: list[Tensor]  # those that get gradients

    def forward(self) -> Tensor:
        return self.layer(*self.arguments)

    def both(self, slope: Tensor) -> object:
        return torch.autograd.grad(self.forward(), self.wanted, slope)


def peers(ours: Side, slope: Tensor, clock: Clock, search: bool) -> Iterator[tuple[str, Side | str]]:
    """(name, side, or why there is none)."""
    makes: dict[str, Callable[[Side], Side]] = {
        "sonicmoe": partial(sonic, slope=slope, clock=clock),
        **({"sonicmoe, its search": searching_sonic} if search else {}),
        "torchtitan": titan,
        "torchtitan, compiled": compiled_titan,
    }
    for name, make in makes.items():
        try:
            side = make(ours)
            apart = _far(side.forward(), ours.forward())
            theirs, mine = (torch.autograd.grad(one.forward(), one.wanted[:2], slope) for one in (side, ours))
            apart = max(apart, *map(_far, theirs, mine))  # of weights some keep gate and up apart
            if not apart < 0.02:  # bf16 rounds at other places, by 2e-3 each
                raise ValueError(f"its output or gradients differ from ours by {apart:.1e}")
            yield name, side
        except Exception as error:
            words = str(error).strip().splitlines() or [""]
            yield name, f"{type(error).__name__}: {words[0][:200]}"


def _far(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().float() - expected.detach().float()).norm() / expected.detach().float().norm())


def sonic(ours: Side, slope: Tensor, clock: Clock) -> Side:
    def milliseconds(tried: list[Tiles]) -> list[float]:
        calls = {str(n): partial(_sonic_side(ours, tiles).both, slope) for n, tiles in enumerate(tried)}
        return list(clock(calls).values())

    tiles = best_tiles(milliseconds)
    print("sonicmoe runs with", {step: _short(tile) for step, tile in tiles.items()}, flush=True)
    return _sonic_side(ours, tiles)


def searching_sonic(ours: Side) -> Side:
    return _sonic_side(ours, None)


def _sonic_side(ours: Side, tiles: Tiles | None) -> Side:
    x_TD, weight_TK, expert_TK, *weights = ours.arguments
    layer = partial(_sonic_layer(), tiles)
    return Side(layer, [x_TD, weight_TK, expert_TK.int(), *weights], ours.wanted)  # int: as its router gives them


def best_tiles(milliseconds: Callable[[list[Tiles]], list[float]]) -> Tiles:
    fixed = {step: [tile for tile in cute_candidates(step, True) if tile.group == _GROUP] for step in STEPS}
    best = {step: tiles[0] for step, tiles in fixed.items()}
    for step in STEPS:
        tried = [best | {step: tile} for tile in fixed[step]]
        taken = milliseconds(tried)
        best = tried[taken.index(min(taken))]
    return best


def _short(tile: CuteConfig) -> str:
    return f"{tile.m}x{tile.n}{' pingpong' if tile.pingpong else ''} cluster {tile.cluster}"


@cache
def _sonic_layer() -> Callable[..., Tensor]:
    import sonicmoe.functional as home
    import sonicmoe.functional.reduction_over_k_gather as sums
    import triton
    from sonicmoe.enums import ActivationType

    sums.token_gather_sum_kernel.configs = [
        triton.Config({"BLOCK_H": block, "BLOCK_K": 8}, num_warps=warps, num_stages=4)
        for block, warps in ((512, 4), (1024, 4), (1024, 8), (2048, 8))
    ]

    def layer(
        tiles: Tiles | None, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        _use(tiles)
        (num_tokens, top_k), num_experts = expert_TK.shape, len(down)
        num_rows = num_tokens * top_k
        count, edges, token, slot, row = (
            torch.empty(size, dtype=torch.int32, device=x_TD.device)
            for size in (num_experts, num_experts + 1, num_rows, num_rows, num_rows)
        )
        home.TC_topk_router_metadata_triton(expert_TK, num_experts, count, edges, token, slot, row)
        order, swiglu = (token, slot, row, None, False), ActivationType.SWIGLU
        # Experts last, which is a view; gate and up are halves.
        act_RH, gate_up_RX = home._UpProjection.apply(
            x_TD, gate_up.permute(1, 2, 0), None, edges, num_rows, top_k, *order, swiglu, False, True
        )
        return home._DownProjection.apply(
            act_RH, gate_up_RX, down.permute(1, 2, 0), None, weight_TK, edges, num_tokens, top_k, *order, swiglu
        )

    return layer


def _use(tiles: Tiles | None) -> None:
    """Their products from here on with these tiles, or with those of their own search."""
    import quack.gemm
    import quack.gemm_interface as theirs
    import sonicmoe.functional.backward as backward
    import sonicmoe.functional.forward as forward

    from threefold.engine.kernels.experts.quack_kernels import _gemm_config

    if tiles is None:
        forward.gemm, forward.gemm_gated = theirs.gemm, theirs.gemm_gated
        backward.gemm, backward.gemm_dgated = theirs.gemm, theirs.gemm_dgated
        return

    def product(a: Tensor, b: Tensor, out: Tensor, step: str = "", **named: Any) -> Tensor:
        for word in ("bias", "batch_idx_permute", "dynamic_scheduler"):
            named.pop(word, None)
        tile = tiles[step or _which(named)]
        quack.gemm.gemm(a, b.mT, out, None, None, tile.m, tile.n, tile.cluster, 1, pingpong=tile.pingpong, **named)
        return out

    forward.gemm = lambda *given, **named: product(*given, step="down", **named)
    backward.gemm = product
    forward.gemm_gated = lambda *given, **named: theirs.gemm_gated(*given, config=_gemm_config(tiles["up"]), **named)
    backward.gemm_dgated = lambda *given, **named: theirs.gemm_dgated(
        *given, config=_gemm_config(tiles["act_grad"]), **named
    )


def _which(named: dict[str, Any]) -> str:
    if "cu_seqlens_m" in named:
        return "input_grad"
    return "up_grad" if named.get("concat_layout") else "down_grad"


class _Given(nn.Module):
    """A router that has decided: what is left of theirs is its count."""

    def __init__(self, top_k: int, num_experts: int) -> None:
        super().__init__()
        self.top_k, self.num_experts = top_k, num_experts
        self.routed: tuple[Tensor, Tensor] | None = None

    def forward(self, x_TD: Tensor, bias: None = None) -> tuple[Tensor, Tensor, Tensor]:
        assert self.routed is not None
        weight_TK, expert_TK = self.routed
        count_E = torch.histc(expert_TK.view(-1), bins=self.num_experts, min=0, max=self.num_experts)
        return weight_TK, expert_TK, count_E


def titan(ours: Side) -> Side:
    from torchtitan.models.moe import MoE, MoEArgs

    x_TD, weight_TK, expert_TK, gate_up, down = ours.arguments
    (num_experts, dim, half), top_k = down.shape, expert_TK.shape[1]
    args = MoEArgs(
        num_experts=num_experts, num_shared_experts=0, top_k=top_k, score_before_experts=False, load_balance_coeff=None
    )
    with torch.device("meta"):
        module = MoE(args, dim, half)
    module.tokens_per_expert = torch.zeros(num_experts, device=x_TD.device)
    module.router = _Given(top_k, num_experts)
    module.router.routed = weight_TK, expert_TK
    # Gate and up apart, as it keeps them.
    gate, up = (part.detach().contiguous() for part in gate_up.chunk(2, dim=1))
    experts = module.experts
    experts.w1, experts.w2, experts.w3 = (nn.Parameter(one) for one in (gate, down.detach(), up))
    return Side(_tokens_of(module), [x_TD], [x_TD, weight_TK, experts.w1, experts.w2, experts.w3])


def compiled_titan(ours: Side) -> Side:
    side = titan(ours)
    return Side(torch.compile(side.layer, dynamic=False), side.arguments, side.wanted)


def _tokens_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
    def layer(x_TD: Tensor) -> Tensor:
        y: Tensor = module(x_TD[None])
        return y[0]

    return layer
