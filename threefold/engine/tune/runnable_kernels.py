"""Facts about this machine from torch, and which kernels run on its GPU: each is tried once on tiny inputs.

`machine/inventory.py` calls it for `threefold env`.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def torch_versions() -> dict[str, str | None]:
    """The versions of torch and of the libraries that come with it; None where this build has none."""
    cudnn, cuda = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None, torch.version.cuda
    return {
        "torch": torch.__version__,
        "cuda": cuda,
        "cudnn": None if cudnn is None else f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
    }


def local_gpus() -> list[tuple[str, int, tuple[int, int]]]:
    """The name, memory in bytes and compute capability of each GPU."""
    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [(gpu.name, gpu.total_memory, (gpu.major, gpu.minor)) for gpu in properties]


def probe_kernels() -> Iterator[tuple[str, str]]:
    """Yield each kernel and why it does not run ("" if it does). Nothing without a GPU: then all is plain torch."""
    if not torch.cuda.is_available():
        return
    for name, probe in _PROBES.items():
        try:
            probe()
            torch.cuda.synchronize()
            yield name, ""
        except Exception as error:
            lines = str(error).strip().splitlines()
            yield name, lines[0] if lines else type(error).__name__


def _ones(*sizes: int) -> Tensor:
    return torch.ones(*sizes, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def _run_backward(y: Tensor) -> None:
    y.float().sum().backward()
    if not bool(y.isfinite().all()):
        raise RuntimeError("the result is not finite")


def _grouped_gemm() -> None:
    ends = torch.tensor([16, 32], device="cuda", dtype=torch.int32)
    _run_backward(F.grouped_mm(_ones(32, 64), _ones(2, 64, 64), offs=ends) * 1.0)


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
        _run_backward(
            fused_experts(_ones(64, 64), weight_TK, expert_TK, _ones(4, 128, 64), _ones(4, 64, 64), choice=kernels)
        )

    return run


def _attention(kernel: SDPBackend) -> Callable[[], None]:
    def run() -> None:
        q, k, v = _ones(1, 2, 128, 64), _ones(1, 1, 128, 64), _ones(1, 1, 128, 64)
        with sdpa_kernel(kernel):
            _run_backward(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))

    return run


def _flash_attention_4() -> None:
    from threefold.engine.attention.flash_attention_4 import flash_attention_4, has_flash_attention_4

    if not has_flash_attention_4(torch.device("cuda")):
        raise RuntimeError("flash-attn-4 is not installed, does not import, or this GPU is no Hopper or Blackwell")
    _run_backward(flash_attention_4(_ones(1, 2, 128, 64), _ones(1, 1, 128, 64), _ones(1, 1, 128, 64), scale=0.125))


def _gated_delta_rule() -> None:
    from threefold.engine.attention.fused_delta import load_kernels

    rule = load_kernels()
    if rule is None:
        raise RuntimeError("flash-linear-attention is not installed or not usable: plain torch takes its place, slowly")
    q, k = (_ones(1, 64, 1, 64) for _ in range(2))
    v, a, b = _ones(1, 64, 2, 64), _ones(1, 64, 2), _ones(1, 64, 2)
    _run_backward(rule.mix(q * 0.1, k * 0.1, v, a, b, _ones(2), _ones(2)))


def _mamba_scan() -> None:
    from threefold.engine.attention.state_space.chunk_scan import ScanInputs
    from threefold.engine.attention.state_space.fused_scan import fused_scan

    scan = fused_scan()
    if scan is None:
        raise RuntimeError("mamba-ssm is not installed or does not import: plain torch takes its place, slowly")
    heads, rate = torch.ones(2, device="cuda"), -torch.ones(2, device="cuda")
    steps = torch.full((1, 64, 2), 0.01, device="cuda")
    inputs = ScanInputs(_ones(1, 64, 2, 64), steps, rate, _ones(1, 64, 1, 64), _ones(1, 64, 1, 64), heads)
    _run_backward(scan(inputs, None))


def _fp8_matmul() -> None:
    values = torch.ones(32, 64, device="cuda").to(torch.float8_e4m3fn)
    gpu = torch.ones((), device="cuda")
    torch._scaled_mm(values, values[:16].mT, scale_a=gpu, scale_b=gpu, out_dtype=torch.bfloat16)


_PROBES: dict[str, Callable[[], None]] = {
    "grouped products (torch)": _grouped_gemm,
    "experts (triton)": _experts("triton"),
    "experts (cute)": _experts("cute"),
    "attention (cuDNN)": _attention(SDPBackend.CUDNN_ATTENTION),
    "attention (flash)": _attention(SDPBackend.FLASH_ATTENTION),
    "attention (FlashAttention-4)": _flash_attention_4,
    "gated delta rule (fla)": _gated_delta_rule,
    "Mamba scan (mamba-ssm)": _mamba_scan,
    "FP8 products (torch)": _fp8_matmul,
}
