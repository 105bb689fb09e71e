"""A microbatch through a chunk, node by node: `Decoder.advance` and `conclude`, which stop when an exchange starts.

A layer with experts is

    attention   mixer, norm, router; the counts leave                             a short stop
    dispatch    rows leave                                                        stop
    shared      shared experts, beside the dispatch, and beside its gradients' way back
    experts     rows land, are computed
    combine     rows leave for home                                               stop
    sum         rows land, are summed and added

and in the backward the same from the end: gradients leave behind `sum` and `experts`, and there it stops. What has no
stop between in the backward is one node: attention and dispatch, with the sum of the layer before; experts and combine.
Any other layer is one node.

Shapes: B batch, S sequence, T = B * S tokens, D model dim, K experts of a token, P rows that travel, S rows as sent.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from threefold.engine.dispatch.local import LocalDispatcher
from threefold.engine.inputs import Inputs
from threefold.engine.models.decoder import Block, Decoder, MtpDepth
from threefold.engine.moe.balance import Balance, attach
from threefold.engine.moe.layer import MoeLayer
from threefold.engine.offload import Loads
from threefold.engine.overlap.borders import Border, Value
from threefold.engine.overlap.nodes import Given, Late, Nodes, first
from threefold.engine.pipeline.passage import Steps

Tell = Callable[[dict[str, Tensor], float | Tensor], None]
Values = tuple[Value, ...]
_NODES = 6  # at most, in a layer


class Walk:
    """Forward, backward and weights of one microbatch through `model`. `tell` gets what the forward says and its share.

    `weights` says when their gradients are computed: "now" with the others, "soon" while the next exchange is under
    way, "later" when `finish` is called.
    """

    def __init__(self, model: Decoder, inputs: Inputs, share: float | Tensor, tell: Tell, weights: str = "now") -> None:
        self.model, self.inputs, self.share, self.tell, self.weights = model, inputs, share, tell, weights
        self.nodes = Nodes(weights != "now", model)
        self._rows: list[int] = []
        self._balances: list[Balance] = []
        self._losses: list[list[Value]] = []
        self._input: Border | None = None
        self._result: Border | None = None

    def forward(self, x_KBSD: Tensor | None) -> Steps[Tensor]:
        """Hidden states in, hidden states or the loss out."""
        states: list[Given] = []
        if x_KBSD is not None:
            self.model.hold(lambda: None)  # FSDP takes whatever it sees first for the root
            self._input = Border(None)
            states = list(self.nodes.run("enter", "", lambda x: x.unbind(0), Value(x_KBSD, self._input)))
        states = yield from self._advance(states)
        result = first(self.nodes.run("end", "", self._end, *states, *(v for row in self._losses for v in row)))
        self._result = result.border
        return result.tensor

    def backward(self, grad: Tensor | None = None) -> Steps[Tensor | None]:
        """From the gradient of the result (None: it is the loss) to that of the hidden states."""
        if self._result is not None:
            self._result.add(torch.ones((), dtype=self._dtype, device=self._device) if grad is None else grad)
        while self.nodes:
            node = self.nodes.run_back()
            if node.lands is not None:
                if node.name == "experts":
                    self.fill()
                # Behind a sum the weights are left for the counts of the forward beside it.
                yield "rows"
                self.fill()
        self.fill()
        self.nodes.end()
        return None if self._input is None else self._input.grad

    def fill(self) -> None:
        if self.weights == "soon":
            self.nodes.run_weights()

    def finish(self) -> None:
        self.nodes.run_weights()

    def _advance(self, states: list[Given]) -> Steps[list[Given]]:
        model, inputs, run = self.model, self.inputs, self.nodes.run
        depths = model.depths if inputs.targets else range(0)
        embedded: Values = ()
        if not states or depths:
            tokens = [] if states else [inputs.tokens_BS]
            tokens += [inputs.targets[depth + 1].tokens_BS for depth in depths]
            # In one node: the embedding then has one gradient a pass, as the reduction of gradients expects.
            embedded = run("embedding", "", lambda: tuple(map(model.embed, tokens)), owner=model)  # type: ignore[arg-type]
        if not states:
            states, embedded = [embedded[0]], embedded[1:]
        hidden = yield from self._layers(model.layers.items(), states.pop())
        if model.norm is not None:
            hidden = first(run("norm", "", model.norm, hidden, owner=model))
        states.append(hidden)
        for depth, ahead in zip(depths, embedded, strict=True):
            number = str(min(depth, model.num_mtp_sets - 1))
            hidden = yield from self._depth(f"mtp.{number}", model.mtp[number], hidden, ahead)
            states.append(hidden)
        return states

    def _depth(self, name: str, module: nn.Module, hidden: Given, embedded: Value) -> Steps[Value]:
        assert isinstance(module, MtpDepth)
        x: Given = first(self.nodes.run("join", name, module.enter, hidden, embedded, owner=self.model))
        x = yield from self._layers(((f"{name}.{key}", block) for key, block in module.layers.named_children()), x)
        return first(self.nodes.run("norm", name, module.norm, x, owner=self.model))

    def _layers(self, layers: Iterable[tuple[str, nn.Module]], x: Given) -> Steps[Given]:
        options = self.model.options
        for number, (name, block) in enumerate(layers):
            assert isinstance(block, Block)
            whole = number < options.activation_offload_layers
            self._away = partial(Loads(options.activation_offload, _NODES if whole else 0).layer, [block])
            if isinstance(block.ffn, MoeLayer) and not isinstance(block.ffn.dispatcher, LocalDispatcher):
                x = yield from self._moe(name, block, block.ffn, x)
            else:
                x = self._whole(name, block, x)
        return x

    def _whole(self, name: str, block: Block, x: Given) -> Value:
        """A layer without an exchange."""
        found: list[Balance | None] = []

        def work(x_BSD: Tensor) -> tuple[Tensor, ...]:
            x_BSD, balance = block(x_BSD, self.inputs.places)
            found.append(balance)
            return x_BSD, *(balance.losses.values() if balance else ())

        with self._away():
            value, *losses = self.nodes.run("layer", name, work, x)
        self._note(block, found[0], losses)
        return value

    def _moe(self, name: str, block: Block, moe: MoeLayer, x: Given) -> Steps[Late]:
        dispatcher, away, nodes = moe.dispatcher, self._away, self.nodes
        found: list[Any] = []

        def attend(x_BSD: Tensor) -> tuple[Tensor, ...]:
            with block.join(*block.mix(x_BSD, self.inputs.places)) as (x_BSD, normed_BSD):
                routing, ticket = moe.route(normed_BSD.flatten(0, 1))
            balance = moe.balance(routing, ticket, len(x_BSD))
            found.extend((ticket, balance))
            return x_BSD, normed_BSD, routing.weight_TK, *balance.losses.values()

        def send(x_BSD: Tensor, normed_BSD: Tensor, weight_TK: Tensor, *losses: Tensor) -> tuple[Tensor, ...]:
            rows = dispatcher.send(normed_BSD.flatten(0, 1), weight_TK, found[0])
            return x_BSD, *rows, *losses, *(() if moe.shared is None else (normed_BSD,))

        with away():
            node = nodes.open("attention", name, attend, x, owner=block)
        del x
        ticket, balance = found
        yield "counts"
        with away():
            nodes.go_on(node, "dispatch", send)
        beside, x_PD, weight_P, *rest = nodes.close(node)
        num_losses = len(balance.losses)
        self._note(block, balance, rest[:num_losses])
        normed = rest[num_losses:]
        del rest
        yield "rows"
        shared: Values = ()
        if normed:
            with away():
                shared = nodes.run("shared", name, lambda n: moe.compute_shared(n.flatten(0, 1)), *normed, owner=block)
        del normed
        with away():
            node = nodes.open("experts", name, lambda r, w: moe.compute(r, w, ticket), x_PD, weight_P, lands=True)
        del x_PD, weight_P
        with away():
            nodes.go_on(node, "combine", lambda y: dispatcher.send_back(y, ticket))
        rows = nodes.close(node)
        yield "rows"

        def add(y_SD: Tensor, x_BSD: Tensor, *shared_TD: Tensor) -> Tensor:
            y_TD = dispatcher.combine_postprocess(y_SD, ticket)
            for each_TD in shared_TD:
                y_TD = y_TD + each_TD
            return x_BSD + y_TD.view_as(x_BSD)

        return Late("sum", name, add, (*rows, beside, *shared))

    def _note(self, block: Block, balance: Balance | None, losses: list[Value]) -> None:
        if balance is not None:
            self._rows.append(block.row)
            self._balances.append(balance)
            self._losses.append(losses)

    def _end(self, *tensors: Tensor) -> Tensor:
        """Losses of routers come behind the hidden states."""
        model, rest = self.model, list(tensors)
        balances: list[tuple[int, Balance]] = []
        for row, balance in zip(reversed(self._rows), reversed(self._balances), strict=True):
            losses = {name: rest.pop() for name in reversed(balance.losses)}
            balances.insert(0, (row, replace(balance, losses=losses)))
        if model.has_loss:
            out = model.conclude(rest, balances, self.inputs)
            assert out.loss is not None
            result, aux = out.loss * self.share, out.aux
        else:
            total, aux = model.add_up({}, balances)
            result = torch.stack(rest)
            result = result if total is None else attach(result, total * self.share)
        self.tell(aux, self.share)
        self._dtype, self._device = result.dtype, result.device
        return result
