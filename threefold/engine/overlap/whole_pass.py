"""FSDP ends a pass when autograd returns. Here a pass is many runs of autograd, and forwards come between them.

torch's private state is touched here and nowhere else.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


class WholePass:
    """Around the nodes of one microbatch's backward. Nothing without FSDP.

    The root is used by many nodes: it stays gathered, and its gradients are reduced once, at the end. Left alone FSDP
    would end the pass behind each node, for every unit of the model.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root if isinstance(root, FSDPModule) else None
        self.state: Any = None if self.root is None else self.root._get_fsdp_state()

    def before(self, owner: object, more: bool) -> None:
        """`more`: another node of the same owner comes later in this pass, and with it more gradients."""
        if self.root is None:
            return
        self.state._state_ctx.post_backward_final_callback_queued = True
        self._keep_root(True)
        _keep_dtype(self.root)
        if isinstance(owner, FSDPModule) and owner is not self.root:
            owner.set_requires_gradient_sync(not more, recurse=False)
            _keep_dtype(owner)

    def behind(self) -> None:
        """A unit that is in its backward would not be gathered for a forward."""
        if self.root is not None:
            for state in self.state._state_ctx.all_states:
                state._training_state = type(state._training_state).IDLE
            self._keep_root(False)

    def end(self) -> None:
        if self.root is not None:
            for state in self.state._state_ctx.all_states:
                for group in _groups(state):
                    states = type(group._training_state)
                    group._training_state = states.IDLE if state is self.state else states.POST_BACKWARD
            self.state._root_post_backward_final_callback()

    def _keep_root(self, keep: bool) -> None:
        assert self.root is not None
        self.root.set_requires_gradient_sync(not keep, recurse=False)
        self.root.set_reshard_after_backward(not keep, recurse=False)


def _keep_dtype(unit: FSDPModule) -> None:
    """Gradients that wait for others of their unit would be widened, and then not reduced with those that came last."""
    for group in _groups(unit._get_fsdp_state()):
        for parameter in group.fsdp_params:
            parameter.reduce_dtype = None


def _groups(state: Any) -> Iterator[Any]:
    many = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one
    yield from (group for group in (many if many is not None else [state._fsdp_param_group]) if group is not None)
