"""Packages that training can do without, what each would give, and how to get it."""

import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec

_IMPORT_SECONDS = 120
_DEEPEP = "https://github.com/deepseek-ai/DeepEP"


@dataclass(frozen=True, slots=True)
class Package:
    name: str  # of the distribution
    module: str  # that must import
    gives: str
    install: str


PACKAGES = (
    Package("torch", "torch", "training and rehearsal", "pip install 'threefold[train]'"),
    Package("triton", "triton", "our own kernels for experts, norms, router, loss", "it comes with torch on Linux"),
    Package(
        "quack-kernels",
        "quack.gemm",
        "CuTe kernels for experts (knobs.expert_kernels)",
        "pip install 'threefold[cute]'",
    ),
    Package(
        "flash-attn-4",
        "flash_attn.cute",
        "FlashAttention-4, where `env --tune` measures it as the fastest",
        "pip install 'threefold[fa4]'",
    ),
    Package(
        "deep_ep", "deep_ep", "DeepEP or HybridEP (knobs.dispatcher)", f"build it from {_DEEPEP}, its branch hybrid-ep"
    ),
    Package(
        "flash-linear-attention", "fla", "a fused gated delta rule (Qwen3-Next)", "pip install flash-linear-attention"
    ),
    Package(
        "transformer-engine",
        "transformer_engine",
        "what target megatron-bridge runs on",
        "pip install transformer-engine",
    ),
    Package("transformers", "transformers", "Hugging Face as oracle and as peer", "pip install transformers"),
    Package("torchtitan", "torchtitan", "a peer to measure against", "pip install torchtitan"),
    Package("sonic-moe", "sonicmoe", "a peer to measure experts against", "pip install sonic-moe (Python 3.12)"),
    Package("safetensors", "safetensors", "Hugging Face checkpoints in and out", "pip install 'threefold[train]'"),
    Package("tokenizers", "tokenizers", "tokenizer files", "pip install 'threefold[train]'"),
    Package("tensorboard", "tensorboard", "TensorBoard events", "pip install 'threefold[train]'"),
    Package("wandb", "wandb", "logging to Weights & Biases (run.wandb)", "pip install wandb"),
    Package("matplotlib", "matplotlib", "plots", "pip install 'threefold[report]'"),
)


@dataclass(frozen=True, slots=True)
class Found:
    """`version` None: not there. `trouble`: why it does not import."""

    package: Package
    version: str | None
    trouble: str = ""

    @property
    def works(self) -> bool:
        return self.version is not None and not self.trouble


def look(package: Package) -> Found:
    version = _version(package)
    return Found(package, version, "" if version is None else _trouble(package.module))


def _version(package: Package) -> str | None:
    """'?' where the module is there without the papers of an installation."""
    try:
        return distribution(package.name).version
    except PackageNotFoundError:
        return "?" if _is_there(package.module) else None


def _is_there(module: str) -> bool:
    """A folder of that name alone is no package: Python takes any for one, and finds nothing in it."""
    try:
        spec = find_spec(module.partition(".")[0])
        if spec is not None and spec.origin is None:
            spec = find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def _trouble(module: str) -> str:
    """Imported in a process of its own: a broken one may take the process with it, and a good one takes memory."""
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"import takes more than {_IMPORT_SECONDS} s"
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().splitlines()
    return said[-1] if said else f"import ended with code {done.returncode}"
