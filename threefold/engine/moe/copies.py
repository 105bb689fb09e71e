"""Copies of hot experts on other ranks of EP (`knobs.expert_balance = "replicate"`).

Each layer has a few slots more (`CopiedExperts`). A step copies hot experts into them as `layout/replicas.py` places
them from the counts of an earlier step, sends a part of their rows there, and in the end sends the gradients of the
copies home, where they are added to those of the owner before anything else sees these. The choice of the router does
not change, only the place of the work. What the slots hold is no parameter: optimizer, checkpoints and data parallelism
know nothing of it, and outside of a step (an evaluation) nothing is sent there.

`engine/build.py` makes the `ExpertCopies` of a rank and `engine/step.py` calls it; `shard/expert_parallel.py` gives
each layer its slots.

Shapes: E experts, e experts owned here, c copies here, s experts sent from here, T tokens, K experts of a token,
W parts of the rows of an expert, ... any dims of a weight.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from threefold.engine.data_parallel.protocol import DataParallelSettings
from threefold.engine.data_parallel.zero1 import Zero1
from threefold.engine.dist.collectives import PendingCollective, all_to_all
from threefold.engine.dist.mesh import TRIVIAL_GROUP, Group
from threefold.engine.dist.shard_placement import replicated
from threefold.engine.moe.experts import Experts
from threefold.layout.replicas import SPLITS, Replicas, place_replicas, ring_of_copies


class GradientSums(Protocol):
    """Data parallelism that sums gradients of copies into those of their owners (`Zero1`, `Fsdp`)."""

    def await_copies(self, names: Iterable[str]) -> None:
        """Reduce the gradients of these parameters only after `add_copies` was called for each, in every step."""

    def add_copies(self, name: str, rows: Sequence[int], grads: Tensor) -> None:
        """Add gradients to rows of the gradient of a parameter. All ranks that share it call this with the same
        rows."""


class CopiedExperts(Experts):
    """The slots of one layer, and which slot computes which rows.

    Slots are numbered rank by rank: the experts that a rank owns and then its copies.
    """

    owner: Experts  # those of this layer that this rank owns

    def __init__(self, experts: Experts, ep: Group, slots: int, name: str) -> None:
        dim, expert_dim = experts.down.shape[1:]
        biased, activation = experts.gate_up_bias is not None, experts.activation_name
        with torch.device("meta"):
            super().__init__(slots, dim, expert_dim, biased, activation, experts.backend, experts.glu_limit)
        self._parameters.clear()  # memory comes with `allocate`, and is of no parameter
        self.fusion, self.kernels, self.lora = experts.fusion, experts.kernels, experts.lora
        self.adds_bias = experts.adds_bias
        if experts.low_precision is not None:
            self.low_precision = type(experts.low_precision)(
                experts.low_precision.recipe, experts.low_precision.cache_weights
            )
        self.ep, self.slots, self.name = ep, slots, name
        self.num_experts = len(experts.down) * ep.size
        self.replicas: Replicas | None = None  # of this step; None: all rows go to the owners of their experts
        self.filling: list[PendingCollective] | None = None  # None: the slots hold old weights
        self._slot_EW: Tensor | None = None
        self.__dict__["owner"] = experts  # no submodule

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The weights in the slots, by the names of the owner's parameters."""
        names = self.owner._parameters
        return {name: weight for name in names if (weight := getattr(self, name)) is not None}

    @property
    def num_slots(self) -> int:
        return self.num_experts + self.ep.size * self.slots

    @property
    def num_own(self) -> int:
        return self.num_experts // self.ep.size

    def allocate(self, dtype: torch.dtype, device: torch.device) -> dict[str, nn.Parameter]:
        """Allocate the slots like the parameters of the owner; those that train, by name."""
        trained = {}
        for name, parameter in self.owner._parameters.items():
            memory = None
            if parameter is not None:
                empty = torch.zeros(self.slots, *parameter.shape[1:], dtype=dtype, device=device)
                memory = nn.Parameter(empty, parameter.requires_grad)
                if parameter.requires_grad:
                    trained[name] = memory
            self.__dict__[name] = memory
        self._slot_EW = self._slots_of_owners().to(device)
        return trained

    def _slots_of_owners(self) -> Tensor:
        slot_E = torch.arange(self.num_experts)
        slot_E += slot_E // self.num_own * self.slots
        return slot_E[:, None].repeat(1, SPLITS)

    def place(self, replicas: Replicas | None) -> None:
        """Use this placement from now on, with weights that are copied when the layer is first used."""
        self.replicas, self.filling = replicas if replicas is not None and replicas.rows else None, None
        slot_EW = self._slots_of_owners()
        if replicas is not None:
            for expert in replicas.rows:
                slot_EW[expert] = torch.tensor(replicas.split(expert, self.ep.rank))
        assert self._slot_EW is not None
        self._slot_EW.copy_(slot_EW)  # in place, for CUDA graphs that read it

    def slots_of(self, expert_TK: Tensor) -> Tensor:
        """The slot that computes each copy of a token; -1 stays where a copy is dropped.

        A token goes by its number, so that neither the host nor a sort is needed to split the rows of an expert.
        """
        assert self._slot_EW is not None
        part_T1 = torch.arange(len(expert_TK), device=expert_TK.device)[:, None] % SPLITS
        return self._slot_EW[expert_TK, part_T1].where(expert_TK >= 0, -1)

    def start_filling(self) -> None:
        """Start to copy the weights of this step, if that has not been done."""
        if self.replicas is not None and self.filling is None:
            owner = self.owner
            if isinstance(owner, FSDPModule):  # the forward of the owner, which comes next, frees them
                owner.unshard()
            self.filling = [
                self._fill(name, weight) for name, weight in owner._parameters.items() if weight is not None
            ]

    @torch.no_grad()
    def _fill(self, name: str, weight: Tensor) -> PendingCollective:
        slots = getattr(self, name)[: sum(self.num_received)]
        return all_to_all(slots.detach(), weight.detach()[self.sent], self.ep, self.num_received, self.num_sent)

    def wait_until_filled(self) -> None:
        for pending in self.filling or ():
            pending.wait()
        self.filling = self.filling and []

    @property
    def sent(self) -> list[int]:
        """The local numbers of the experts that this rank copies to others, by rank."""
        first = self.num_own * self.ep.rank
        return [expert - first for of_rank in self._sent_to for expert in of_rank]

    @property
    def num_sent(self) -> list[int]:
        return list(map(len, self._sent_to))

    @property
    def num_received(self) -> list[int]:
        assert self.replicas is not None
        return [len(self.replicas.copied_between(owner, self.ep.rank)) for owner in range(self.ep.size)]

    @property
    def _sent_to(self) -> list[tuple[int, ...]]:
        assert self.replicas is not None
        return [self.replicas.copied_between(self.ep.rank, rank) for rank in range(self.ep.size)]

    def send_home(self, grads: Tensor) -> Tensor:
        """The gradients of the experts that this rank has sent, from the gradients of all slots."""
        home = grads.new_empty(sum(self.num_sent), *grads.shape[1:])
        received = grads[: sum(self.num_received)]
        all_to_all(home, received, self.ep, self.num_sent, self.num_received).wait()
        return home


class ExpertCopies:
    """The copied experts of all layers of a rank.

    `layers` are in the order of the model, each with the number of its router.
    """

    fills_all_slots = False  # whatever was counted: a rehearsal has no counts

    def __init__(
        self,
        layers: Sequence[tuple[int, CopiedExperts]],
        every: int,
        data: GradientSums,
        settings: DataParallelSettings,
        dtype: torch.dtype,
    ) -> None:
        self.layers, self.every, self.data = layers, every, data
        self.load_LE: list[list[float]] | None = None  # of the step from which the copies are placed
        self.age = 0  # steps with the copies of these counts
        holder = nn.Module()
        for n, (_, layer) in enumerate(layers):
            for name, memory in layer.allocate(dtype, settings.device).items():
                holder.register_parameter(f"{n}_{name}", memory)
        # The sums over the microbatches of a step are those of ZeRO-1, on one rank.
        placements = {name: replicated(p.shape, ()) for name, p in holder.named_parameters()}
        alone = replace(settings, overlap_grad_reduce=False, overlap_param_gather=False)
        self.sums = Zero1([holder], placements, lambda _: TRIVIAL_GROUP, alone)
        data.await_copies(f"{layer.name}.{name.partition('_')[2]}" for name, layer in self._trained)

    @cached_property
    def _trained(self) -> list[tuple[str, CopiedExperts]]:
        """Names of the weights that train, and their layers."""
        shards = sorted(self.sums.updated, key=lambda owned: owned.name)
        return [(owned.name, self.layers[int(owned.name.partition("_")[0])][1]) for owned in shards]

    def begin_step(self, passes: int) -> None:
        self.sums.begin_step(passes)
        for number, layer in self.layers:
            if self.fills_all_slots:
                layer.place(ring_of_copies(layer.num_experts, layer.ep.size, layer.slots))
            else:
                load_E = None if self.load_LE is None else self.load_LE[number]
                layer.place(None if load_E is None else place_replicas(load_E, layer.ep.size, layer.slots))

    def sum_gradients(self) -> None:
        """Bring the gradients of the copies home. From here on no rows go to them."""
        self.sums.finish_grad_sync()
        grads = {owned.name: owned.grad for owned in self.sums.updated}
        for name, layer in self._trained:
            weight, parameter = name.partition("_")[2], getattr(layer, name.partition("_")[2])
            grad = grads[name]
            grad = torch.zeros_like(parameter) if grad is None else grad.view(parameter.shape)
            rows = layer.sent if layer.replicas is not None else []
            home = layer.send_home(grad.detach()) if layer.replicas is not None else grad[:0]
            self.data.add_copies(f"{layer.name}.{weight}", rows, home)
        for _, layer in self.layers:
            layer.place(None)

    def observe(self, load_LE: Sequence[Sequence[float]]) -> None:
        """Note the counts of a step, summed over all ranks."""
        self.age += 1
        if self.load_LE is None or self.age >= self.every:
            self.load_LE, self.age = [list(row) for row in load_LE], 0

    def state(self) -> dict[str, Any]:
        """The counts that a resumed run needs to place the same copies."""
        return {"load": self.load_LE, "age": self.age}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.load_LE, self.age = state["load"], state["age"]
