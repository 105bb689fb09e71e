"""Compiles kernels for Hopper and Blackwell on a machine without a GPU.

Gluon kernels can be neither run nor interpreted there. Those in Triton can be interpreted, but what the interpreter
runs may still break the compiler.
"""

import os
from importlib.util import find_spec
from typing import Any

SHARED_BYTES = 227 * 1024  # of one program on Hopper


def gluon_known() -> bool:
    """Whether our Gluon kernels are written for the installed release of triton."""
    if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    import triton

    from threefold.engine.kernels.availability import _GLUON_RELEASES

    return _GLUON_RELEASES[0] <= tuple(int(part) for part in triton.__version__.split(".")[:2]) < _GLUON_RELEASES[1]


def blocks(dtype: str, *shape: int) -> str:
    """The type of a tensor that a kernel loads or stores by TMA in blocks of this shape."""
    from triton.experimental.gluon import language as gl

    dtypes = {"bf16": gl.bfloat16, "fp32": gl.float32, "fp8e4nv": gl.float8e4nv}
    layout = gl.NVMMASharedLayout.get_default_for(list(shape), dtypes[dtype])
    return f"tensordesc<{dtype}[{', '.join(map(str, shape))}],{layout!r}>"


def compile_for_hopper(kernel: Any, kinds: dict[str, str], constants: dict[str, Any]) -> None:
    """Compile a Gluon kernel whose arguments have these types, and assert that it multiplies on tensor cores and
    fits."""
    from triton.experimental.gluon._runtime import GluonASTSource

    made = _compile(GluonASTSource, kernel, kinds, constants, num_warps=4)
    assert "wgmma.mma_async" in made.asm["ptx"]


def compile_triton(
    kernel: Any, kinds: dict[str, str], constants: dict[str, Any], num_warps: int, capability: int = 90
) -> None:
    """The same for a Triton kernel, which need not multiply, and for Blackwell with capability 100."""
    from triton.compiler import ASTSource

    kernel = getattr(kernel, "kernel", None) or kernel
    numbers = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    _compile(ASTSource, kernel, kinds, constants, num_warps, numbers, capability)


def _compile(
    source: Any,
    kernel: Any,
    kinds: dict[str, str],
    constants: dict[str, Any],
    num_warps: int,
    given: dict[Any, Any] | None = None,
    capability: int = 90,
) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = getattr(kernel, "kernel", None) or kernel  # without `fast_launch`
    # Tensors begin at multiples of 16 bytes, as they do when a kernel is launched.
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in kinds if kinds[name][0] == "*"}
    types = kinds | dict.fromkeys(constants, "constexpr")
    made = triton.compile(
        source(kernel, {name: types[name] for name in kernel.arg_names}, given or constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps},
    )
    assert made.metadata.shared <= SHARED_BYTES
    return made
