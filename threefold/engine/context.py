"""The engine's ambient state: what code deep inside a step may ask for without being handed it as an argument.

There is one object per process, `context`. The modules that own a field set it for the length of a `with` block and
put the old value back: a dry run enters `device.simulate("cuda")`, a pipeline schedule enters a `WgradQueue`, and so
on. Nothing else assigns to it.

No field is thread-local and none is a context variable. Autograd runs the backward of CUDA tensors on a thread of its
own while the thread that called `backward()` waits, and a recompute inside that backward must see what the forward saw.
Only the thread that trains changes fields; the prefetch and checkpoint threads never look at them.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch.compiler import is_compiling


@dataclass
class EngineContext:
    """Every ambient value of the engine, with the module that owns it."""

    # device.py: the type of the device that tensors stand for in a dry run; None where they are what they are.
    simulated_device: str | None = None
    # kernels/fusion_switch.py: False makes norms, rotary embedding, router and permutation run as plain torch.
    fused_kernels: bool = os.environ.get("THREEFOLD_FUSED") != "0"
    # dist/host_sizes.py: where the host gets the row counts of an exchange in place of reading them from the device.
    size_source: Callable[[int, int, bool], list[int]] | None = None
    # dist/collectives.py: each sees every collective before it starts.
    collective_observers: tuple[Callable[[Any], Any], ...] = ()
    # models/decoder.py: the `Padding` of the microbatch whose forward runs; None: its tokens are all useful.
    padding: Any = None
    # autograd/saved_tensors.py: handlers of the tensors that autograd saves, the innermost last.
    saved_tensor_handlers: tuple[Any, ...] = ()
    # autograd/saved_tensors.py: where functions that run twice leave outputs in the first run, the outermost first.
    output_stores: tuple[Any, ...] = ()
    # autograd/offload.py: the layer whose named activations go to host memory.
    offloaded_layer: Any = None
    # autograd/delayed_wgrad.py: where linear layers leave their weight gradients; None computes them at once.
    wgrad_queue: Any = None
    # graphs/recorder.py: whether the work that runs now is being recorded as a CUDA graph.
    recording_graph: bool = False
    # graphs/full_iteration.py: blocks of a fixed size for the rows of an exchange; None: as many as there are.
    static_rows: Any = None
    # graphs/scopes.py: makes the recorders of a dry run in place of those of a GPU; None: a GPU records.
    make_recorder: Callable[[], Any] | None = None
    # schedule/autograd_nodes.py: entered around the forward, backward and weight gradients of every node.
    node_observer: Callable[[str, str, str], AbstractContextManager[None]] | None = None
    # effects/observe_step.py: what code paths a step took, by kind and detail; None in a step that is not observed.
    event_counts: Counter[tuple[str, str]] | None = None
    # effects/activation_bytes.py: sees tensors that recompute and offload keep from being saved; None: not observed.
    activation_observer: Any = None
    # effects/own_times.py: entered around every wait for other ranks; None: nobody measures.
    wait_timer: Callable[[], AbstractContextManager[None]] | None = None


context = EngineContext()
Method = Callable[..., Any]


def count_event(kind: str, detail: str, times: int = 1) -> None:
    """Count that a step took a code path, in a step that is observed.

    Code that torch.compile traces is not counted: the counts would become guards, and fail in every observed step.
    """
    if not is_compiling() and context.event_counts is not None:
        context.event_counts[kind, detail] += times


def timed_wait() -> AbstractContextManager[None]:
    """Around a wait for other ranks."""
    return nullcontext() if context.wait_timer is None else context.wait_timer()


@contextmanager
def override(name: str, value: Any) -> Iterator[None]:
    """Set one field of the context for the length of a `with` block."""
    before = getattr(context, name)
    setattr(context, name, value)
    try:
        yield
    finally:
        setattr(context, name, before)


@contextmanager
def wrapped_method(target: Any, method: str, wrapper: Callable[[Method], Method]) -> Iterator[None]:
    """Replace a method of an object or of a class, frozen objects too, and put it back as it was."""
    inner: Method = getattr(target, method)
    before = vars(target).get(method)
    replace, remove = (setattr, delattr) if isinstance(target, type) else (object.__setattr__, object.__delattr__)
    replace(target, method, wraps(inner)(wrapper(inner)))
    try:
        yield
    finally:
        if before is None:
            remove(target, method)
        else:
            replace(target, method, before)
