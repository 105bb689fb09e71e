"""Launches of Triton kernels that cost the host less: a compiled kernel is called without Triton's Python in between.

`kernel[grid](...)` of Triton binds the arguments, specializes each of them, looks at environment variables and builds
strings for its cache keys, which takes 20 to 40 microseconds a launch. A layer of experts launches some fifteen kernels
in a forward and backward, and at few tokens the GPU waits for them. `fast_launch` finds the compiled kernel by a key of
its own and calls it. The first launch of each kind still goes through Triton, which compiles.

The key holds what Triton specializes a kernel on: dtypes and 16-byte alignment of tensors, whether an integer is 1 or
divisible by 16 and whether it needs 64 bits, dtypes and blocks of tensor descriptors, and the values of constants and
launch options. Hooks of Triton's own profiler are not called. Descriptors for the copy engine (TMA) are made once for
each address, shape and strides: torch's allocator hands out the same addresses in every step.

This depends on the inside of Triton. A release that it was not tried with launches its kernels itself, as does Triton's
interpreter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import os
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
import triton  # type: ignore
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore

_RELEASES = ("3.6.",)  # releases whose compiled kernels take the arguments that `_Compiled` passes
_IS_KNOWN = triton.__version__.startswith(_RELEASES) and torch.version.hip is None
_FAST = _IS_KNOWN and os.environ.get("TRITON_INTERPRET") != "1"
_INT32 = 2**31
_MAX_MAPS = 4096  # descriptors that are kept for one argument of a compiled kernel


def fast_launch(kernel: Any) -> Any:
    """Decorate a `triton.jit` function that is launched from Python: `kernel[grid](...)` stays as it is."""
    return _FastKernel(kernel) if _FAST else kernel


class TensorBlocks:
    """A tensor that a kernel loads or stores block by block, and the shape of a block.

    Gluon kernels name the layout of a block in shared memory, which follows from its shape and dtype.
    """

    __slots__ = ("base", "block", "layout")

    def __init__(self, base: torch.Tensor, block: list[int], layout: Any = None) -> None:
        self.base, self.block, self.layout = base, tuple(block), layout

    def descriptor(self) -> TensorDescriptor:
        if self.layout is None:
            return TensorDescriptor.from_tensor(self.base, list(self.block))
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor  # type: ignore

        return GluonDescriptor.from_tensor(self.base, list(self.block), self.layout)


def tensor_blocks(base: torch.Tensor, block: list[int], layout: Any = None) -> Any:
    """A tensor descriptor, as an argument of a kernel with `fast_launch`."""
    blocks = TensorBlocks(base, block, layout)
    return blocks if _FAST else blocks.descriptor()


class _FastKernel:
    """A kernel and its compiled forms, by the kind of arguments they take."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._is_constant = tuple(parameter.is_constexpr for parameter in kernel.params)
        self._names = tuple(parameter.name for parameter in kernel.params)
        self._arguments: dict[tuple[type, ...], _Arguments] = {}
        self._compiled: dict[tuple[Any, ...], _Compiled] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> "_Launch":
        return _Launch(self, grid)

    def launch(self, grid: tuple[int, ...], args: tuple[Any, ...], named: dict[str, Any]) -> None:
        device = torch._C._cuda_getDevice()
        types = tuple(map(type, args))
        arguments = self._arguments.get(types)
        if arguments is None:
            arguments = self._arguments[types] = _Arguments(types, self._is_constant)
        key = arguments.key(device, args, named)
        found = self._compiled.get(key)
        if found is not None:
            found.launch(grid, torch._C._cuda_getCurrentRawStream(device), args)
            return
        given = [arg.descriptor() if isinstance(arg, TensorBlocks) else arg for arg in args]
        compiled = self.kernel[grid](*given, **named)
        # Parameters that follow the positional arguments must be constants given by name: their values are in the key.
        rest = range(len(args), len(self._names))
        if all(self._is_constant[n] and self._names[n] in named for n in rest) and _Compiled.takes(compiled, args):
            self._compiled[key] = _Compiled(compiled, args, tuple(named[self._names[n]] for n in rest))


class _Compiled:
    """A compiled kernel, and the arguments that are the same in all of its launches."""

    def __init__(self, compiled: Any, args: tuple[Any, ...], rest: tuple[Any, ...]) -> None:
        launcher, self._rest = compiled.run, rest
        self._launch = launcher.launch
        self._metadata = compiled.metadata.tensordesc_meta if _num_blocks(args) else []
        self._maps: list[dict[Any, tuple[Any, ...]]] = [{} for _ in self._metadata]
        if self._maps:
            # Triton wraps its launcher in a function that makes descriptors; `_with_maps` does that here.
            names = launcher.launch.__code__.co_freevars
            self._launch = launcher.launch.__closure__[names.index("launcher")].cell_contents
        # Memory that the kernel does not need, its metadata, and three hooks for profilers.
        options = launcher.launch_cooperative_grid, launcher.launch_pdl, None, None
        self._fixed = compiled.function, *options, compiled.packed_metadata, None, None, None

    @staticmethod
    def takes(compiled: Any, args: tuple[Any, ...]) -> bool:
        """Whether the kernel needs no memory that Triton allocates for every launch, and has its descriptors made for
        it by the host."""
        num_blocks = _num_blocks(args)
        known = not num_blocks or len(compiled.metadata.tensordesc_meta or ()) == num_blocks
        return known and not compiled.run.global_scratch_size and not compiled.run.profile_scratch_size

    def launch(self, grid: tuple[int, ...], stream: int, args: tuple[Any, ...]) -> None:
        size_y, size_z = grid[1] if len(grid) > 1 else 1, grid[2] if len(grid) > 2 else 1
        given = self._with_maps(args) if self._maps else args
        self._launch(grid[0], size_y, size_z, stream, *self._fixed, *given, *self._rest)

    def _with_maps(self, args: tuple[Any, ...]) -> list[Any]:
        """The arguments with the map, the shape and the strides of each descriptor in its place."""
        given: list[Any] = []
        number = 0
        for arg in args:
            if type(arg) is not TensorBlocks:
                given.append(arg)
                continue
            maps, base = self._maps[number], arg.base
            key = base.data_ptr(), base.shape, base.stride()
            made = maps.get(key)
            if made is None:
                if len(maps) >= _MAX_MAPS:
                    maps.clear()
                made = maps[key] = _make_map(arg, self._metadata[number])
            given.extend(made)
            number += 1
        return given


def _num_blocks(args: tuple[Any, ...]) -> int:
    return sum(isinstance(arg, TensorBlocks) for arg in args)


def _make_map(arg: TensorBlocks, metadata: Any) -> tuple[Any, ...]:
    from triton.backends.nvidia.driver import make_tensordesc_arg  # type: ignore

    return tuple(make_tensordesc_arg(arg.descriptor(), metadata))


class _Launch:
    """A kernel with its grid."""

    __slots__ = ("grid", "kernel")

    def __init__(self, kernel: _FastKernel, grid: tuple[int, ...]) -> None:
        self.kernel, self.grid = kernel, grid

    def __call__(self, *args: Any, **named: Any) -> None:
        self.kernel.launch(self.grid, args, named)


def launch_key(
    device: int, args: tuple[Any, ...], is_constant: tuple[bool, ...], named: dict[str, Any]
) -> tuple[Any, ...]:
    """Equal for launches that Triton would run with the same compiled kernel."""
    return _Arguments(tuple(map(type, args)), is_constant).key(device, args, named)


class _Arguments:
    """Where the arguments of each kind are, in launches whose arguments have these types.

    It is made once for each sequence of types, because `key` runs for every launch.
    """

    def __init__(self, types: tuple[type, ...], is_constant: tuple[bool, ...]) -> None:
        self._types = types
        kinds = [(n, kind, constant) for n, (kind, constant) in enumerate(zip(types, is_constant, strict=False))]
        self._constants = _getter([number for number, _, constant in kinds if constant])
        self._tensors = _getter([n for n, kind, constant in kinds if not constant and issubclass(kind, torch.Tensor)])
        self._integers = [number for number, kind, constant in kinds if not constant and kind is int]
        self._blocks = [number for number, kind, constant in kinds if not constant and kind is TensorBlocks]

    def key(self, device: int, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """What decides which compiled kernel fits the arguments. A float or None counts by its type alone."""
        tensors = self._tensors(args)
        addresses = 0
        for tensor in tensors:
            addresses |= tensor.data_ptr()
        kinds: list[Any] = [tensor.dtype for tensor in tensors]
        for number in self._integers:
            value = args[number]
            kinds.append("one" if value == 1 else (value % 16 == 0, -_INT32 <= value < _INT32))
        for number in self._blocks:
            blocks = args[number]
            kinds += blocks.base.dtype, blocks.block
        if addresses % 16:
            kinds += [tensor.data_ptr() % 16 == 0 for tensor in tensors]
        return (device, self._types, self._constants(args), *kinds, *named.items())


def _getter(numbers: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """The items with these numbers, as a tuple."""
    if len(numbers) < 2:
        return lambda items: tuple(items[number] for number in numbers)
    return itemgetter(*numbers)
