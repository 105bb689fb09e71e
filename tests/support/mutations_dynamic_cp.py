"""Mutations of dynamic context parallelism."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mutation_registry import breaks, replace_attribute, wrap_attribute
from torch import Tensor

from threefold.engine import step
from threefold.engine.attention.backend import attend
from threefold.engine.batch import Batch
from threefold.engine.data import dynamic_cp as dynamic_steps
from threefold.engine.data.dynamic_cp import DynamicSteps
from threefold.engine.dist.collectives import all_reduce
from threefold.engine.models.inputs import Inputs
from threefold.engine.shard import context_parallel as dynamic_context
from threefold.engine.shard.context_parallel import DegreeSwitch


def _attend_to_all(*parts: Tensor, documents_BS: Any = None, bounds: Any = None, **options: Any) -> Tensor:
    return attend(*parts, **options)


@breaks("dynamic cp", often=True)
def rows_have_half_their_degree() -> None:
    def batch(old: Callable[..., Batch], *args: Any) -> Batch:
        made = old(*args)
        assert made.cp_degree is not None
        return replace(made, cp_degree=max(1, made.cp_degree // 2))

    wrap_attribute(DynamicSteps, "batch", batch)


@breaks("dynamic cp")
def sharded_documents_attend_on_their_rank_alone() -> None:
    def function(old: Callable[..., Any], module: Any, plan: Any, cp_comm: str, groups: Any) -> Any:
        return old(module, plan, cp_comm, groups) if groups.group.size != 2 else _attend_to_all

    wrap_attribute(dynamic_context, "_function", function)


@breaks("dynamic cp")
def attention_crosses_short_documents() -> None:
    replace_attribute(dynamic_context, "attend_each_document", _attend_to_all)


@breaks("dynamic cp", often=True)
def shared_rows_are_counted_by_every_rank() -> None:
    def summed(parts: Any, batches: Any, values_MK: Tensor) -> Tensor:
        total_K = values_MK.sum(dim=0)
        all_reduce(total_K, parts.mesh.group("dp", "cp")).wait()
        return total_K

    replace_attribute(step, "_sum_over_rows", summed)


@breaks("dynamic cp, dp and ep")
def labels_of_other_replicas_are_not_counted() -> None:
    def summed(parts: Any, batches: Any, values_MK: Tensor) -> Tensor:
        degree_M = values_MK.new_tensor([batch.cp_degree for batch in batches])
        total_K = (values_MK / degree_M[:, None]).sum(dim=0)
        all_reduce(total_K, parts.mesh.group("cp")).wait()
        return total_K

    replace_attribute(step, "_sum_over_rows", summed)


@breaks("dynamic cp, two depths")
def depths_are_divided_by_the_labels_of_their_microbatch() -> None:
    replace_attribute(Inputs, "targets_of_step", lambda inputs, ratios: inputs.targets)


@breaks("dynamic cp")
def balancing_losses_are_summed_over_all_ranks() -> None:
    def use(switch: DegreeSwitch, degree: int | None) -> None:
        switch.degree = degree or switch.full_degree

    replace_attribute(DegreeSwitch, "use", use)


@breaks("dynamic cp, dp and ep")
def last_document_is_left_out() -> None:
    wrap_attribute(dynamic_steps, "pack_step", lambda old, documents, *more: old(documents[:-1], *more))
