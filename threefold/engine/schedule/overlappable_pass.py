"""One microbatch through a pipeline chunk, cut into graph nodes at the expert-parallel exchanges.

It computes what `Decoder.forward_chunk` and `compute_loss` compute, but as a generator that stops wherever an exchange
has started; `interleave.py` then lets another microbatch compute. The forward of a layer with experts has these parts:

    attention   runs mixer, norm and router; starts the exchange of counts        then a short stop
    dispatch    starts sending the rows                                           then a stop
    shared      runs the shared experts while the rows travel
    experts     waits for the rows and computes them
    combine     starts sending the results back                                   then a stop
    sum         waits for the results, sums them and adds them to the residual stream

After a short stop the other pass only fills the gap with delayed weight gradients; after a stop it computes until its
own next stop. The backward goes through the parts from the end. It stops after `sum` and after `experts`, where it has
started to send gradients, and runs the backward of `shared` while the gradients of the rows travel. Parts with no stop
between them in the backward share one node: (sum of the layer before, attention, dispatch) and (experts, combine). Any
other layer is one node.

Shapes: B batch, S sequence, T = B * S tokens, D model dim, K experts of a token, P rows that travel. In y_SD alone, S
is the number of rows that this rank sent, as in `dispatch/protocol.py`.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from threefold.engine.autograd.offload import LayerOffloads
from threefold.engine.context import override
from threefold.engine.dispatch.local import LocalDispatcher
from threefold.engine.models.block import Block
from threefold.engine.models.decoder import Decoder, MtpDepth
from threefold.engine.models.inputs import Inputs
from threefold.engine.moe.balance import RouterStats, attach_loss
from threefold.engine.moe.layer import MoeLayer
from threefold.engine.schedule.autograd_cuts import CutEdge, NodeValue
from threefold.engine.schedule.autograd_nodes import DeferredValue, GraphNodes, NodeInput, single_value
from threefold.engine.schedule.microbatch_pass import PassSteps

Report = Callable[[dict[str, Tensor], float | Tensor], None]
Values = tuple[NodeValue, ...]
_MAX_NODES = 6  # nodes of a layer


class OverlappedPass:
    """Forward, backward and weight gradients of one microbatch through `model`.

    `report` is called with the losses and statistics of the forward and with `share`, the microbatch's label share.
    `wgrad` says when weight gradients are computed: "now" with the input gradients, "soon" while the next exchange is
    under way, "later" when `finish` is called. `in_graphs` is entered around the forward: parts of it may be replayed
    as CUDA graphs.
    """

    def __init__(
        self,
        model: Decoder,
        inputs: Inputs,
        share: float | Tensor,
        report: Report,
        wgrad: str = "now",
        in_graphs: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.model, self.inputs, self.share, self.report, self.wgrad = model, inputs, share, report, wgrad
        self.in_graphs = in_graphs
        self.nodes = GraphNodes(wgrad != "now", model)
        self._router_numbers: list[int] = []
        self._router_stats: list[RouterStats] = []
        self._losses: list[list[NodeValue]] = []
        self._input: CutEdge | None = None
        self._result: CutEdge | None = None

    def forward(self, x_KBSD: Tensor | None) -> PassSteps[Tensor]:
        """From the hidden states of the chunk before (None for the first) to the hidden states, or to the loss."""
        states: list[NodeInput] = []
        if x_KBSD is not None:
            self.model.run_with_parameters(lambda: None)  # FSDP takes the module that it sees first for the root
            self._input = CutEdge(None)
            states = list(self.nodes.run("enter", "", lambda x: x.unbind(0), NodeValue(x_KBSD, self._input)))
        with self.in_graphs():
            states = yield from self._forward_chunk(states)
        result = single_value(
            self.nodes.run("end", "", self._finish_forward, *states, *(v for row in self._losses for v in row))
        )
        self._result = result.cut_edge
        return result.tensor

    def backward(self, grad: Tensor | None = None) -> PassSteps[Tensor | None]:
        """From the gradient of the result (None where it is the loss) to the gradient of the hidden states."""
        if self._result is not None:
            self._result.add(torch.ones((), dtype=self._dtype, device=self._device) if grad is None else grad)
        while self.nodes:
            node = self.nodes.run_backward()
            if node.ends_exchange_of is not None:
                if node.name == "experts":
                    self.fill_gap()
                # Weight gradients behind a sum are left for the gap in which the other forward waits for its counts.
                yield "rows"
                self.fill_gap()
        self.fill_gap()
        self.nodes.end()
        return None if self._input is None else self._input.grad

    def fill_gap(self) -> None:
        if self.wgrad == "soon":
            self.nodes.run_wgrads()

    def finish_wgrads(self) -> None:
        self.nodes.run_wgrads()

    def _forward_chunk(self, states: list[NodeInput]) -> PassSteps[list[NodeInput]]:
        model, inputs, run = self.model, self.inputs, self.nodes.run
        depths = model.depths if inputs.targets else range(0)
        embedded: Values = ()
        num_features = model.num_features
        placed = states[num_features : num_features + len(depths)] if model.num_ahead else []
        if not states or depths:
            offsets = [*([] if states else [0]), *(depth + 1 for depth in depths)]
            # One node for all embeddings gives the parameter one gradient a pass, as the gradient reduction expects.
            embedded = run("embedding", "", partial(self._embed, offsets), *placed, owner=model)
        if not states:
            num_sent = len(embedded) - 1 - len(depths)
            num_features = num_sent - (len(model.later_depths) if model.vision is not None else 0)
            states, embedded = list(embedded[: num_sent + 1]), embedded[num_sent + 1 :]
        used = min(num_features, len(model.layers))
        features, states = states[:used], [*states[used:num_features], *states[num_features + len(placed) :]]
        hidden = yield from self._layers(model.layers.items(), states.pop(), features)
        if model.norm is not None:
            hidden = single_value(run("norm", "", model.norm, hidden, owner=model))
        states.append(hidden)
        for depth, ahead in zip(depths, embedded, strict=True):
            number = str(min(depth, model.num_mtp_sets - 1))
            hidden = yield from self._mtp_depth(f"mtp.{number}", model.mtp[number], hidden, ahead)
            states.append(hidden)
        return states

    def _embed(self, offsets: list[int], *placed: Tensor) -> tuple[Tensor, ...]:
        """The features of pictures that layers and later depths read, where this chunk encodes them, and the tokens at
        each offset, with the features that were placed there by an earlier chunk."""
        model, inputs = self.model, self.inputs
        pictures = model.encode_pictures(inputs) if 0 in offsets else None
        features = [*pictures.dense_deepstack(), *pictures.dense_ahead(model.later_depths)] if pictures else []
        given = zip_longest(offsets, placed)
        return *features, *(model.embed_tokens(inputs, pictures, offset, there) for offset, there in given)

    def _mtp_depth(self, name: str, module: nn.Module, hidden: NodeInput, embedded: NodeValue) -> PassSteps[NodeValue]:
        assert isinstance(module, MtpDepth)
        x: NodeInput = single_value(
            self.nodes.run("join", name, module.join_embedding, hidden, embedded, owner=self.model)
        )
        x = yield from self._layers(((f"{name}.{key}", block) for key, block in module.layers.named_children()), x)
        return single_value(self.nodes.run("norm", name, module.norm, x, owner=self.model))

    def _layers(
        self, layers: Iterable[tuple[str, nn.Module]], x: NodeInput, features: Sequence[NodeInput] = ()
    ) -> PassSteps[NodeInput]:
        options, added = self.model.options, iter(features)
        for number, (name, block) in enumerate(layers):
            assert isinstance(block, Block)
            whole = number < options.activation_offload_layers
            self._offloading = partial(
                LayerOffloads(options.activation_offload, _MAX_NODES if whole else 0).layer, [block]
            )
            if isinstance(block.ffn, MoeLayer) and not isinstance(block.ffn.dispatcher, LocalDispatcher):
                x = yield from self._layer_with_exchange(name, block, block.ffn, x)
            else:
                x = self._layer_without_exchange(name, block, x)
            if (feature := next(added, None)) is not None:
                x = single_value(self.nodes.run("deepstack", name, torch.add, x, feature))
        return x

    def _layer_without_exchange(self, name: str, block: Block, x: NodeInput) -> NodeValue:
        """A dense layer, or one whose experts are all on this rank, as one node."""
        found: list[RouterStats | None] = []

        def work(x_BSD: Tensor) -> tuple[Tensor, ...]:
            with override("padding", self.inputs.padding):
                x_BSD, stats = block(x_BSD, self.inputs.positions)
            found.append(stats)
            return x_BSD, *(stats.losses.values() if stats else ())

        with self._offloading():
            value, *losses = self.nodes.run("layer", name, work, x)
        self._record_stats(block, found[0], losses)
        return value

    def _layer_with_exchange(self, name: str, block: Block, moe: MoeLayer, x: NodeInput) -> PassSteps[NodeInput]:
        dispatcher, offloading, nodes = moe.dispatcher, self._offloading, self.nodes
        found: list[Any] = []

        def mix_and_route(x_BSD: Tensor) -> tuple[Tensor, ...]:
            with override("padding", self.inputs.padding):
                return route(x_BSD)

        def route(x_BSD: Tensor) -> tuple[Tensor, ...]:
            positions = self.inputs.positions
            if block.graphed_router is not None:
                x_BSD, normed_BSD, weight_TK, state, stats = block.graphed_router.mix_and_preprocess(x_BSD, positions)
            else:
                x_BSD, normed_BSD, routing = block.mix_and_route(x_BSD, positions)
                weight_TK, state = (
                    routing.weight_TK,
                    dispatcher.dispatch_preprocess(routing.expert_TK, routing.weight_TK),
                )
                stats = moe.compute_stats(routing, state, len(x_BSD))
            found.extend((state, stats))
            routed_TD = moe.routed_input(normed_BSD.flatten(0, 1))
            return x_BSD, normed_BSD, routed_TD, weight_TK, *stats.losses.values()

        def dispatch_rows(
            x_BSD: Tensor, normed_BSD: Tensor, routed_TD: Tensor, weight_TK: Tensor, *losses: Tensor
        ) -> tuple[Tensor, ...]:
            rows = dispatcher.token_dispatch(routed_TD, weight_TK, found[0])
            return x_BSD, *rows, *losses, *(() if moe.shared is None else (normed_BSD,))

        with offloading():
            node = nodes.open("attention", name, mix_and_route, x, owner=block)
        del x
        state, stats = found
        yield "counts"
        with offloading():
            nodes.extend(node, "dispatch", dispatch_rows)
        residual, x_PD, weight_P, *rest = nodes.close(node)
        num_losses = len(stats.losses)
        self._record_stats(block, stats, rest[:num_losses])
        normed = rest[num_losses:]
        del rest
        yield "rows"
        shared: Values = ()
        if normed:
            with offloading():
                shared = nodes.run("shared", name, lambda n: moe.compute_shared(n.flatten(0, 1)), *normed, owner=block)
        del normed
        with offloading():
            node = nodes.open(
                "experts", name, lambda r, w: moe.compute(r, w, state), x_PD, weight_P, ends_exchange=True
            )
        del x_PD, weight_P
        with offloading():
            nodes.extend(node, "combine", lambda y: dispatcher.token_combine(y, state))
        rows = nodes.close(node)
        yield "rows"

        def add_to_residual(y_SD: Tensor, x_BSD: Tensor, *shared_TD: Tensor) -> Tensor:
            y_TD = moe.add_shared(dispatcher.combine_postprocess(y_SD, state), *shared_TD)
            return block.add_output(x_BSD, y_TD.view_as(x_BSD))

        if moe.out_norm is not None:  # a node of its own, in which FSDP has this layer's parameters
            with offloading():
                inputs = (*rows, residual, *shared)
                node = nodes.open("sum", name, add_to_residual, *inputs, owner=block, ends_exchange=True)
            return single_value(nodes.close(node))
        return DeferredValue("sum", name, add_to_residual, (*rows, residual, *shared))

    def _record_stats(self, block: Block, stats: RouterStats | None, losses: list[NodeValue]) -> None:
        if stats is not None:
            self._router_numbers.append(block.router_number)
            self._router_stats.append(stats)
            self._losses.append(losses)

    def _finish_forward(self, *tensors: Tensor) -> Tensor:
        """The loss, or the hidden states with the router losses attached, from hidden states and router losses."""
        model, rest = self.model, list(tensors)
        router_stats: list[tuple[int, RouterStats]] = []
        for row, stats in zip(reversed(self._router_numbers), reversed(self._router_stats), strict=True):
            losses = {name: rest.pop() for name in reversed(stats.losses)}
            router_stats.insert(0, (row, replace(stats, losses=losses)))
        if model.has_loss:
            model.expected_loss_grad = self.share
            out = model.compute_loss(rest, router_stats, self.inputs)
            assert out.loss is not None
            result, aux = out.loss * self.share, out.aux
        else:
            total, aux = model.sum_losses({}, router_stats)
            result = torch.stack(rest)
            result = result if total is None else attach_loss(result, total * self.share)
        self.report(aux, self.share)
        self._dtype, self._device = result.dtype, result.device
        return result
