"""Makes torch's FSDP work in an overlapped pass, where one backward is many calls of autograd.

torch's FSDP ends its backward pass when a call of autograd returns, which would be after the first node.
`autograd_nodes.py` calls `FsdpBackward` around each node; forwards of another microbatch run between the nodes. This
module is the only one that touches torch's private FSDP state.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


class FsdpBackward:
    """Called around the nodes of one microbatch's backward; it does nothing without FSDP.

    The root's parameters are used by many nodes: they stay gathered, and their gradients are reduced once at the end.
    Without this FSDP would end the pass after each node, for every unit of the model.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root if isinstance(root, FSDPModule) else None
        self.state: Any = None if self.root is None else self.root._get_fsdp_state()

    def before_node(self, owner: object, more_grads_follow: bool) -> None:
        """`more_grads_follow`: another node of the same owner runs later in this backward."""
        if self.root is None:
            return
        self.state._state_ctx.post_backward_final_callback_queued = True
        self._hold_root(True)
        _reduce_in_grad_dtype(self.root)
        if isinstance(owner, FSDPModule) and owner is not self.root:
            owner.set_requires_gradient_sync(not more_grads_follow, recurse=False)
            _reduce_in_grad_dtype(owner)

    def after_node(self) -> None:
        """Mark all units as idle: FSDP does not gather a unit that is in its backward for a forward."""
        if self.root is not None:
            for state in self.state._state_ctx.all_states:
                state._training_state = type(state._training_state).IDLE
            self._hold_root(False)

    def finish(self) -> None:
        if self.root is not None:
            for state in self.state._state_ctx.all_states:
                for group in _param_groups(state):
                    states = type(group._training_state)
                    is_reduced = state is not self.state and not _has_unreduced_grads(group)
                    group._training_state = states.POST_BACKWARD if is_reduced else states.IDLE
            self.state._root_post_backward_final_callback()

    def _hold_root(self, hold: bool) -> None:
        assert self.root is not None
        self.root.set_requires_gradient_sync(not hold, recurse=False)
        self.root.set_reshard_after_backward(not hold, recurse=False)


def _reduce_in_grad_dtype(unit: FSDPModule) -> None:
    """Gradients that wait for others of their unit would be cast to the reduce dtype and then not be reduced with the
    gradients that come last; without a reduce dtype they stay as they are."""
    for group in _param_groups(unit._get_fsdp_state()):
        for parameter in group.fsdp_params:
            parameter.reduce_dtype = None


def _has_unreduced_grads(group: Any) -> bool:
    """Whether gradients of a unit are not reduced yet: FSDP does so where the gradient of the unit's input is there,
    and the input of a patch embedding has none."""
    unsharded = (getattr(parameter, "_unsharded_param", None) for parameter in group.fsdp_params)
    return any(parameter is not None and parameter.grad is not None for parameter in unsharded)


def _param_groups(state: Any) -> Iterator[Any]:
    many = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one
    yield from (group for group in (many if many is not None else [state._fsdp_param_group]) if group is not None)
