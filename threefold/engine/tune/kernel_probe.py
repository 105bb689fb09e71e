"""What torch says of this machine, and which kernels run on its GPU: each tried once, tiny, forward and backward."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def versions_here() -> dict[str, str | None]:
    """Of torch and of what came with it; None where this build has none."""
    cudnn, cuda = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None, torch.version.cuda
    return {
        "torch": torch.__version__,
        "cuda": cuda,
        "cudnn": None if cudnn is None else f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
    }


def gpus_here() -> list[tuple[str, int, tuple[int, int]]]:
    """(name, bytes, compute capability) of each."""
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(at) for at in range(torch.cuda.device_count())]
    return [(one.name, one.total_memory, (one.major, one.minor)) for one in found]


def probed() -> Iterator[tuple[str, str]]:
    """(kernel, why it does not run here). Nothing without a GPU: on a CPU the engine runs plain torch."""
    if not torch.cuda.is_available():
        return
    for name, work in _PROBES.items():
        try:
            work()
            torch.cuda.synchronize()
            yield name, ""
        except Exception as error:
            said = str(error).strip().splitlines()
            yield name, said[0] if said else type(error).__name__


def _made(*sizes: int) -> Tensor:
    return torch.ones(*sizes, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def _ran(y: Tensor) -> None:
    y.float().sum().backward()
    if not bool(y.isfinite().all()):
        raise RuntimeError("the result is not finite")


def _grouped() -> None:
    ends = torch.tensor([16, 32], device="cuda", dtype=torch.int32)
    _ran(F.grouped_mm(_made(32, 64), _made(2, 64, 64), offs=ends) * 1.0)


def _experts(kernels: str) -> Callable[[], None]:
    def run() -> None:
        from threefold.engine.kernels.availability import has_triton_kernels
        from threefold.engine.kernels.experts.fused_experts import fused_experts
        from threefold.engine.kernels.experts.kernel_choice import require_kernels

        if not has_triton_kernels(torch.device("cuda")):
            raise RuntimeError("needs triton and compute capability 9.0")
        require_kernels(kernels, torch.device("cuda"))
        expert_TK = torch.arange(128, device="cuda").view(64, 2) % 4
        weight_TK = torch.full((64, 2), 0.5, device="cuda")
        _ran(fused_experts(_made(64, 64), weight_TK, expert_TK, _made(4, 128, 64), _made(4, 64, 64), choice=kernels))

    return run


def _attention(kernel: SDPBackend) -> Callable[[], None]:
    def run() -> None:
        q, k, v = _made(1, 2, 128, 64), _made(1, 1, 128, 64), _made(1, 1, 128, 64)
        with sdpa_kernel(kernel):
            _ran(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))

    return run


def _fa4() -> None:
    from threefold.engine.attention.flash_attention_4 import flash_attention_4, has_flash_attention_4

    if not has_flash_attention_4(torch.device("cuda")):
        raise RuntimeError("flash-attn-4 is not installed, does not import, or this GPU is no Hopper or Blackwell")
    _ran(flash_attention_4(_made(1, 2, 128, 64), _made(1, 1, 128, 64), _made(1, 1, 128, 64), scale=0.125))


def _delta() -> None:
    if find_spec("fla") is None:
        raise RuntimeError("flash-linear-attention is not installed: plain torch takes its place, slowly")
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v = (_made(1, 64, 2, 64) for _ in range(3))
    g, beta = -torch.ones(1, 64, 2, device="cuda"), _made(1, 64, 2)
    _ran(chunk_gated_delta_rule(q * 0.01, k * 0.01, v, g, beta)[0])


def _fp8() -> None:
    low = torch.ones(32, 64, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    torch._scaled_mm(low, low[:16].mT, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


_PROBES: dict[str, Callable[[], None]] = {
    "grouped products (torch)": _grouped,
    "experts (triton)": _experts("triton"),
    "experts (cute)": _experts("cute"),
    "attention (cuDNN)": _attention(SDPBackend.CUDNN_ATTENTION),
    "attention (flash)": _attention(SDPBackend.FLASH_ATTENTION),
    "attention (FlashAttention-4)": _fa4,
    "gated delta rule (fla)": _delta,
    "FP8 products (torch)": _fp8,
}
