"""Applies recompute and activation offload to a built model by wrapping methods of its modules.

A plan names modules (`knobs.recompute`, `knobs.activation_offload`) or whole layers. `apply_activation_memory` wraps
the methods that stand for these names; the bodies of the modules have no code for it, and parameters keep their names.
The tables below say what each name means: the method, and for recompute the method inside which its output is
discarded. `models/build.py` and `shard/order.py` call it.

Where tokens are many, full recompute and the recompute of `moe` and `mlp` go through the feed-forward network in
chunks, and attention goes through groups of heads (`head_groups.py`), so that the backward holds the tensors of one
chunk or group at a time.

Shapes: B batch, S sequence, D model dim, T = B * S tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor, nn

from threefold.engine.attention.gated_delta import GatedDelta
from threefold.engine.attention.gqa import GqaAttention
from threefold.engine.attention.mla import MlaAttention
from threefold.engine.attention.sparse.compressed import CompressedAttention
from threefold.engine.attention.sparse.sparse_mla import SparseMlaAttention
from threefold.engine.attention.state_space.mamba import Mamba
from threefold.engine.autograd.offload import LayerOffloads, offload_activations
from threefold.engine.autograd.recompute import OutputScope, recompute, recompute_output
from threefold.engine.autograd.saved_tensors import inside_recompute
from threefold.engine.autograd.token_chunks import chunk_size, run_in_chunks
from threefold.engine.layers.input_linears import apply_linears
from threefold.engine.layers.mlp import Mlp
from threefold.engine.layers.positions import Positions
from threefold.engine.model_options import Options
from threefold.engine.models.block import Block, NumberedStats, StreamBlock, run_layers
from threefold.engine.models.decoder import Decoder, MtpDepth
from threefold.engine.models.head_groups import GqaHeadGroups, MlaHeadGroups
from threefold.engine.moe.balance import RouterStats
from threefold.engine.moe.experts import Experts
from threefold.engine.moe.layer import MoeLayer

# Recompute by name: the class, the method whose output is discarded, and the methods inside which its consumers run.
_DISCARDED_OUTPUTS: dict[str, tuple[tuple[type[nn.Module], tuple[str, ...], tuple[str, ...]], ...]] = {
    "layernorm": (
        (
            Block,
            ("normalize_for_mixer", "normalize_for_ffn"),
            ("mix", "ffn_branch", "normalize_and_route", "mix_and_route"),
        ),
    ),
    "mla_up_proj": (
        (MlaAttention, ("expand",), ("attend_latents",)),
        (SparseMlaAttention, ("expand",), ("attend_chosen",)),
    ),
    "core_attn": (
        (MlaAttention, ("core", "core_over_ranks"), ("attend_latents",)),
        (SparseMlaAttention, ("core_of_chosen",), ("attend_chosen",)),
        (CompressedAttention, ("core",), ("attend",)),
        (GqaAttention, ("core",), ("forward",)),
        (GatedDelta, ("core",), ("forward",)),
        (Mamba, ("core",), ("forward",)),
    ),
    "gdn_norm_out": ((GatedDelta, ("normalize_output",), ("forward",)),),
    "moe_act": ((Experts, ("activate",), ("forward",)),),
}
# Offload by name: the class and the methods whose saved tensors go to the host.
_OFFLOADED: dict[str, tuple[tuple[type[nn.Module], tuple[str, ...]], ...]] = {
    "attn_norm": ((Block, ("normalize_for_mixer",)),),
    "mlp_norm": ((Block, ("normalize_for_ffn",)),),
    "qkv_linear": (
        (MlaAttention, ("compress", "expand")),
        (CompressedAttention, ("compress", "expand")),
        (GqaAttention, ("project",)),
        (GatedDelta, ("project",)),
        (Mamba, ("project",)),
    ),
    "core_attn": (
        (MlaAttention, ("core", "core_over_ranks")),
        (SparseMlaAttention, ("core_of_chosen",)),
        (CompressedAttention, ("core",)),
        (GqaAttention, ("core",)),
        (GatedDelta, ("core", "normalize_output")),
        (Mamba, ("core", "normalize_output")),
    ),
    "attn_proj": (
        (MlaAttention, ("project_out",)),
        (CompressedAttention, ("project_out",)),
        (GqaAttention, ("project_out",)),
        (GatedDelta, ("project_out",)),
        (Mamba, ("project_out",)),
    ),
    "expert_fc1": ((Experts, ("up_proj",)),),
    "moe_act": ((Experts, ("activate",)),),
    "fused_group_mlp": ((MoeLayer, ("run_experts", "run_copies", "run_fused_experts")),),
}


def apply_activation_memory(model: Decoder, options: Options) -> None:
    """Wrap the methods of every block, in place. Called once for a model, before it is split into pipeline chunks.

    The order matters: an offload is outside of a recompute, so that it sees the inputs that the recompute saves.
    """
    names, is_full = options.recomputed_modules, "full" in options.recompute
    for module in model.modules():
        _discard_outputs(module, names)
        if isinstance(module, MoeLayer) and "shared_experts" in names:
            _wrap(module, "compute_shared", lambda function: partial(recompute, function, name="shared_experts"))
        if type(module) is MlaAttention and ("mla_up_proj" in names or is_full):
            eager = _weak_method(module, "attend_latents")
            module.attend_latents = MlaHeadGroups(module, eager, names)  # type: ignore[method-assign]
        if type(module) is GqaAttention and is_full:
            module.forward = GqaHeadGroups(module, _weak_method(module, "forward"))  # type: ignore[method-assign]
        if isinstance(module, Block) and module.ffn is not None and ({"moe", "mlp"} & names or is_full):
            _recompute_ffn(module, names, options.ffn_chunk)
        for name in options.activation_offload:
            for kind, methods in _OFFLOADED[name]:
                if isinstance(module, kind):
                    for method in methods:
                        _wrap(module, method, partial(offload_activations, name))
    for depth in model.mtp.values():
        assert isinstance(depth, MtpDepth)
        (of_no_layer,) = options.for_chunks([0])
        apply_to_layers(depth, depth.layers, of_no_layer)


def apply_to_layers(owner: Decoder | MtpDepth, layers: Iterable[nn.Module], options: Options) -> None:
    """Recompute and offload of whole layers. Called for each pipeline chunk with the options of that chunk."""
    if "full" in options.recompute or options.activation_offload or options.activation_offload_layers:
        owner.run_layers = LayerRunner(options)  # type: ignore[method-assign]
    for group, is_recomputed in options.layer_groups(list(layers)):
        for block in group if is_recomputed and len(group) == 1 else []:
            assert isinstance(block, Block)
            if isinstance(block.ffn, MoeLayer):
                _recompute_chunks(block.ffn, "full")
            block.forward = ChunkedRecompute(block, options.recompute_save)  # type: ignore[method-assign]


def _wrap(module: nn.Module, method: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(module, method, wrapper(_weak_method(module, method)))


def _weak_method(module: nn.Module, method: str) -> Callable[..., Any]:
    """The method as it is now, bound weakly: a module that holds itself is freed by the garbage collector only."""
    if method in module.__dict__:
        wrapped: Callable[..., Any] = module.__dict__[method]
        return wrapped
    function, weak_module = getattr(type(module), method), ref(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(weak_module(), *args, **kwargs)

    return call


def _discard_outputs(module: nn.Module, names: frozenset[str]) -> None:
    chosen = [
        (name, outputs, scopes)
        for name in names
        for kind, outputs, scopes in _DISCARDED_OUTPUTS.get(name, ())
        if isinstance(module, kind)
    ]
    if not chosen:
        return
    scope = OutputScope()
    for method, name in {method: name for name, outputs, _ in chosen for method in outputs}.items():
        if isinstance(module, Block) and not isinstance(module, StreamBlock):
            _wrap(module, method, partial(_recompute_norm, scope))
        else:
            _wrap(module, method, partial(scope.output, name=name))
    for method in {method for _, _, scopes in chosen for method in scopes}:
        _wrap(module, method, scope.scope)


def _recompute_norm(scope: OutputScope, normalize: Callable[..., Any]) -> Callable[..., Any]:
    """Recompute a norm, but not the sum of the residual stream before it: the recompute would save both terms."""
    recomputed = scope.output(normalize, "layernorm")

    def normalized(x_BSD: Tensor, *added_BSD: Tensor) -> Any:
        for y_BSD in added_BSD:
            x_BSD = x_BSD + y_BSD
        return recomputed(x_BSD)

    return normalized


class FeedForward:
    """`Block.run_ffn` with recompute of `moe` or `mlp`, in chunks of tokens where they are many."""

    def __init__(self, block: Block, names: frozenset[str], ffn_chunk: int | None) -> None:
        assert block.ffn is not None
        self.ffn, self.ffn_chunk = block.ffn, ffn_chunk
        self.is_moe = isinstance(block.ffn, MoeLayer)
        self.name = "moe" if self.is_moe else "mlp"
        self.is_recomputed = self.name in names

    def __call__(
        self, x_BSD: Tensor, *tokens_BS: Tensor, recompute_chunks: bool = False
    ) -> tuple[Tensor, RouterStats | None]:
        output = self._run(x_BSD, *tokens_BS, recompute_chunks=recompute_chunks or self.is_recomputed)
        return output if self.is_moe else (output, None)

    def _run(self, x_BSD: Tensor, *tokens_BS: Tensor, recompute_chunks: bool) -> Any:
        if not self.runs_in_chunks(x_BSD):
            return recompute(self.ffn, x_BSD, *tokens_BS, enabled=self.is_recomputed, name=self.name)
        if self.is_moe or not (recompute_chunks or inside_recompute()):
            return self.ffn(x_BSD, *tokens_BS)  # MoeLayer goes through its chunks by itself
        size = self._mlp_chunk_size(x_BSD)
        name = self.name if self.is_recomputed else "full"
        return run_in_chunks(self.ffn, size, x_BSD.flatten(0, 1), recompute=True, name=name).view_as(x_BSD)

    def runs_in_chunks(self, x_BSD: Tensor) -> bool:
        if isinstance(self.ffn, MoeLayer):
            return self.ffn.runs_in_chunks(x_BSD)
        return self._mlp_chunk_size(x_BSD) < x_BSD.shape[:-1].numel()

    def _mlp_chunk_size(self, x_BSD: Tensor) -> int:
        """Tokens of a chunk; all of them where tensor parallelism communicates inside the MLP."""
        assert isinstance(self.ffn, Mlp)
        num_tokens = x_BSD.shape[:-1].numel()
        if self.ffn.input_linears is not apply_linears:
            return num_tokens
        return chunk_size(num_tokens, self.ffn.up.out_features * x_BSD.element_size(), self.ffn_chunk)


def _recompute_ffn(block: Block, names: frozenset[str], ffn_chunk: int | None) -> None:
    block.run_ffn = FeedForward(block, names, ffn_chunk)  # type: ignore[method-assign]
    if isinstance(block.ffn, MoeLayer) and "moe" in names:
        _recompute_chunks(block.ffn, "moe")


def _recompute_chunks(moe: MoeLayer, name: str) -> None:
    """Recompute each chunk of tokens by itself, and the router, which sees all tokens at once, apart from them."""
    moe.recompute_chunks, moe.recomputed_by = True, name
    route_and_measure, runs_in_chunks = _weak_method(moe, "route_and_measure"), _weak_method(moe, "runs_in_chunks")

    def recomputed(num_sequences: int, x_TD: Tensor, *tokens_T: Tensor) -> Any:
        run = partial(route_and_measure, num_sequences)
        return recompute(run, x_TD, *tokens_T, enabled=runs_in_chunks(x_TD), name=name)

    moe.route_and_measure = recomputed  # type: ignore[method-assign]


class LayerRunner:
    """`run_layers` with full recompute of groups of layers, and with offload."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def __call__(
        self, layers: Iterable[nn.Module], x_BSD: Tensor, positions: Positions, features: Sequence[Tensor] = ()
    ) -> tuple[Tensor, NumberedStats]:
        router_stats: NumberedStats = []
        offloads = LayerOffloads(self.options.activation_offload, self.options.activation_offload_layers)
        for group, is_recomputed in self.options.layer_groups(list(layers)):
            in_chunks = is_recomputed and len(group) == 1 and _runs_in_chunks(group[0], x_BSD)
            last = len(group) - 1
            with offloads.layer(group):
                run, inside = partial(_run_group, group, positions), features[:last]
                enabled, save = is_recomputed and not in_chunks, self.options.recompute_save
                x_BSD, more = recompute(run, x_BSD, *inside, enabled=enabled, name="full", save=save)
                # Added here, the feature behind the last layer is no input that the recompute saves.
                for feature_BSD in features[last : last + 1]:
                    x_BSD = x_BSD + feature_BSD
            features = features[last + 1 :]
            router_stats += more
        return x_BSD, router_stats


def _run_group(
    layers: Sequence[nn.Module], positions: Positions, x_BSD: Tensor, *features: Tensor
) -> tuple[Tensor, NumberedStats]:
    return run_layers(layers, x_BSD, positions, features)


def _runs_in_chunks(block: nn.Module, x_BSD: Tensor) -> bool:
    assert isinstance(block, Block)
    if block.ffn is None:
        return False
    assert isinstance(block.run_ffn, FeedForward)
    return block.run_ffn.runs_in_chunks(x_BSD)


class ChunkedRecompute:
    """`Block.forward` of a layer that is fully recomputed by itself.

    Where its feed-forward network runs in chunks, only the input of the layer is saved all the same, but the network is
    recomputed chunk by chunk and not together with the mixer.
    """

    def __init__(self, block: Block, save: tuple[str, ...]) -> None:
        self._block, self.eager, self.save = ref(block), _weak_method(block, "forward"), save

    @property
    def block(self) -> Block:
        block = self._block()
        assert block is not None
        return block

    def __call__(self, x_BSD: Tensor, positions: Positions) -> tuple[Tensor, RouterStats | None]:
        block = self.block
        if not _runs_in_chunks(block, x_BSD):
            return self.eager(x_BSD, positions)
        up_to_ffn = partial(self._up_to_ffn, positions)
        with recompute_output(up_to_ffn, x_BSD, name="full", save=self.save) as (*kept, y_BSD):
            assert isinstance(block.run_ffn, FeedForward)
            y_BSD, stats = block.run_ffn(y_BSD, *block.router_tokens(kept), recompute_chunks=True)
        return block.add_output(*kept, y_BSD), stats

    def _up_to_ffn(self, positions: Positions, x_BSD: Tensor) -> tuple[Tensor, ...]:
        return self.block.normalize_for_ffn(*self.block.mix(x_BSD, positions))
