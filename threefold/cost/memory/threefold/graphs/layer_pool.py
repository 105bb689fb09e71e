"""The memory pool of graphs that hold whole MoE layers, or mixers with the delta rule: their passes, block by block.

`pools.py` asks for the pool of one microbatch in flight. Tensors that a layer's forward and backward make and free go
through torch's allocator for graphs in their order: those of one size seldom fit where those of another were, so that a
pool is larger than the most bytes that are live in it.

Mirrors `engine/graphs/graphed_part.py`, `engine/graphs/scopes.py`.
"""

from collections.abc import Sequence

from threefold.cost.memory.threefold.activations import ffn_norm_bytes, layer_activations, mixer_bytes
from threefold.cost.memory.threefold.graphs.torch_pool import GraphPool
from threefold.cost.memory.threefold.local_sizes import FP32, LocalSizes, for_layer
from threefold.cost.memory.threefold.timelines.moe_backward import moe_backward_steps, weight_grad_bytes
from threefold.cost.memory.threefold.timelines.moe_forward import moe_forward_peak
from threefold.cost.memory.threefold.timelines.timeline import Timeline
from threefold.cost.memory.threefold.transients import mixer_backward_transients
from threefold.cost.stage_contents import first_gradient_in
from threefold.spec.model import ATTENTION_MIXERS, GqaSpec, Layer, MlaSpec

_MATCH = 0.01  # sizes that differ by less are of the same tensor
_PERIOD = 4  # layers after which the kinds of a model's layers repeat; of long chunks two periods are gone through


class PoolTimeline(Timeline):
    """A timeline whose tensors are blocks of a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.blocks, self._count = GraphPool(), dict[int, float](), 0  # bytes of live blocks by number

    def make(self, *sizes: float) -> None:
        super().make(*sizes)
        for size in sizes:
            if size > 0:
                self._count += 1
                self.blocks[self._count] = size
                self.pool.resize(self._count, int(size))

    def free(self, *sizes: float) -> None:
        super().free(*sizes)
        for size in sizes:
            self._free_blocks(size)

    def pass_through(self, *sizes: float) -> None:
        before = {*self.blocks}
        self.make(*sizes)
        super().free(*sizes)
        self.drop(*(self.blocks.keys() - before))

    def _free_blocks(self, size: float) -> None:
        """Free the last block of this size or, if there is none, the largest ones that make it up."""
        left = size
        while left > _MATCH * size:
            fitting = [(each, number) for number, each in self.blocks.items() if each <= left * (1 + _MATCH)]
            if not fitting:
                return
            each, number = max(fitting)
            self.drop(number)
            left -= each

    def drop(self, *numbers: int) -> None:
        """Free blocks by their numbers."""
        for number in numbers:
            del self.blocks[number]
            self.pool.resize(number, 0)


def simulated_parts(scopes: set[str], layer: Layer) -> set[str]:
    """The parts of a layer whose graphs are gone through here: `moe`, and `mixer` where it is the delta rule, or where
    it shares a graph with the MoE layer behind it."""
    parts = {"moe"} if layer.ffn == "moe" and "moe" in scopes else set()
    is_mixer = layer.mixer == "delta" or (layer.mixer in ATTENTION_MIXERS and bool(parts))
    return parts | ({"mixer"} if is_mixer and "attn" in scopes else set())


def layer_pool_bytes(local: LocalSizes, scopes: set[str], layers: Sequence[Layer], weight_grads: float) -> float:
    """Bytes of the pool of one microbatch in flight. `weight_grads` of an MoE layer stay in the pool, if there are
    any."""
    layers = [each for each in layers if simulated_parts(scopes, each) and first_gradient_in(each) != "none"]
    if len(layers) <= 2 * _PERIOD:
        return _pool_bytes(local, scopes, layers, weight_grads)
    one, two = (_pool_bytes(local, scopes, layers[: number * _PERIOD], weight_grads) for number in (1, 2))
    return two + (two - one) * (len(layers) / _PERIOD - 2)


def _pool_bytes(local: LocalSizes, scopes: set[str], layers: Sequence[Layer], weight_grads: float) -> float:
    experts = weight_grad_bytes(local) if local.model.moe else 0.0
    fc2 = experts / (1 + local.num_fc1)
    line, row = PoolTimeline(), local.element_bytes * local.model.dim * local.tokens
    saved: list[tuple[Layer, set[int], set[int]]] = []
    for layer in layers:
        parts, before = simulated_parts(scopes, layer), {*line.blocks}
        if "mixer" in parts:
            _mixer_forward(line, for_layer(local, layer), layer)
        of_mixer = line.blocks.keys() - before
        if "moe" in parts:
            _moe_forward(line, for_layer(local, layer), layer, row)
        of_ffn = line.blocks.keys() - before - of_mixer
        saved.append((layer, of_mixer, of_ffn - {max(of_ffn, default=0)}))  # the last one is the result
    for layer, of_mixer, of_ffn in reversed(saved):
        parts, before = simulated_parts(scopes, layer), {*line.blocks}
        for _ in range(round(1 / local.expert_chunk_fraction) if "moe" in parts else 0):
            moe_backward_steps(for_layer(local, layer), line=line)
            line.drop(*(line.blocks.keys() - before))
        line.drop(*(line.blocks.keys() & of_ffn))
        if "moe" in parts:
            line.make(row)
        if weight_grads and "moe" in parts:
            line.make(fc2, experts - fc2, weight_grads - experts)
        if "mixer" in parts:
            _mixer_backward(line, for_layer(local, layer), layer)
        line.drop(*(line.blocks.keys() & of_mixer))
    return float(line.pool.num_bytes)


def _mixer_forward(line: PoolTimeline, local: LocalSizes, layer: Layer) -> None:
    """What a mixer and its norm save, most of it of one size. The delta rule has keys and values side by side before
    and behind its triangular solve."""
    size = _tensor_bytes(local, layer)
    saved = layer_activations(local, layer)
    of_norm = max(0.0, saved.get("norms", 0.0) - ffn_norm_bytes(local, layer))
    line.make(*_blocks(saved.get("attention", 0.0) + of_norm, size))
    if layer.mixer == "delta":
        line.pass_through(2 * size, 2 * size)


def _mixer_backward(line: PoolTimeline, local: LocalSizes, layer: Layer) -> None:
    """What is recomputed, and gradients: of the output and of queries, and what the attention kernel works in. Those of
    the delta rule are of its output, of what chunks made of keys and values, and of both side by side before and behind
    the solve."""
    size, recomputed = _tensor_bytes(local, layer), mixer_bytes(local.without_recompute, layer)
    spec, inside = local.model.attention, max(0.0, mixer_backward_transients(local, layer) - 2 * size)
    num_inside = 3 if isinstance(spec, GqaSpec) and spec.sinks else 1  # gradients of sinks come from three tensors
    gradients = [size, size, *[inside / num_inside] * num_inside]
    if layer.mixer == "delta":
        gradients = [*[size] * 7, 2 * size, 2 * size]
    line.pass_through(*_blocks(max(0.0, recomputed - mixer_bytes(local, layer)), size), *gradients)


def _tensor_bytes(local: LocalSizes, layer: Layer) -> float:
    """Bytes of most tensors of a mixer: keys of all heads of the delta rule in fp32, or queries."""
    model = local.model
    if layer.mixer == "delta" and model.delta is not None:
        return FP32 * model.delta.num_v_heads * model.delta.k_dim / local.tp * local.gathered_tokens
    spec = model.attention_of(layer)
    assert spec is not None
    width = spec.num_heads * spec.qk_dim if isinstance(spec, MlaSpec) else spec.q_dim
    return local.element_bytes * width / local.tp * local.gathered_tokens


def _blocks(total: float, size: float) -> list[float]:
    """So many bytes as tensors of one size, and the rest."""
    number = int(total // size)
    return [size] * number + [total - number * size]


def _moe_forward(line: PoolTimeline, local: LocalSizes, layer: Layer, row: float) -> None:
    """Norm, router and experts of one layer, and the residual stream behind it, which is made last."""
    line.make(row, row)  # the input of the norm and its output
    normed = max(line.blocks)
    if local.routes_in_fp32 and "router" not in local.saved_inputs:
        line.pass_through(FP32 / local.element_bytes * row)
    line.make(layer_activations(local, layer).get("router", 0.0))
    fraction = local.expert_chunk_fraction
    for _ in range(round(1 / fraction)):
        moe_forward_peak(local, line=line)
    part = row * fraction
    outputs = [n for n, size in line.blocks.items() if n > normed and abs(size - part) <= _MATCH * part]
    if ffn_norm_bytes(local, layer) < 1.5 * row:
        line.drop(normed)
    line.make(row)
    line.drop(*outputs[-round(1 / fraction) :])
