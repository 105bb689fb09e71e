"""Stand-ins for packages without a CPU build, so that Megatron's modules import on a machine without a GPU.

None of Megatron's own code is replaced. A stand-in is a module whose attributes are made when they are asked for:
empty classes, which also work as decorators, enums and base classes. Layers of Transformer Engine are modules with
empty parameters, because Megatron registers what it finds on them.
"""

import abc
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import typing
from typing import Any

from threefold.interop.megatron.judge.verdict import STAND_IN

# These need CUDA to be imported, whether they are installed or not.
_NEED_CUDA = {
    "transformer_engine",
    "transformer_engine_torch",
    "deep_ep",
    "fused_weight_gradient_mlp_cuda",
    "fla",
    "causal_conv1d",
    "mamba_ssm",
}
# These take seconds to import and have no part in a validation: data, diffusion, plots and logs.
_NO_PART = {"diffusers", "datasets", "pandas", "peft", "scipy", "matplotlib", "tensorboard", "wandb", "webdataset"}
# These are replaced where they are not installed: no part of a validation rests on them.
_OPTIONAL = {"nvidia_resiliency_ext", "modelopt", "megatron.energon", "IPython"}
# Newest versions that release 0.6.2 of Megatron Bridge was published with; only those that Megatron compares.
_VERSIONS = {"deep_ep": "1.2.1", "modelopt": "0.44.0", "nvidia_resiliency_ext": "0.6.0"}


class AnyClass(abc.ABCMeta):
    """The class of stand-in classes: they have every attribute and may be subscripted."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = stand_in_class(name)
        setattr(cls, name, made)
        return made

    def __getitem__(cls, item: Any) -> Any:
        return cls


def stand_in_class(name: str) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        pass

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return args[0] if len(args) == 1 and callable(args[0]) else None

    __init__.__qualname__ = f"{STAND_IN}{name}.__init__"
    body = {"__init__": __init__, "__call__": __call__, "__doc__": "a stand-in", "is_stand_in": True}
    return AnyClass(f"{STAND_IN}{name}", (), body)


_WITH_LAYERS = ("transformer_engine.pytorch", "mamba_ssm.ops.triton.layernorm_gated")
_LAYERS = {"Linear", "LayerNormLinear", "LayerNorm", "RMSNorm", "GroupedLinear", "DotProductAttention", "LayerNormMLP"}
_CONTEXTS = {"fp8_model_init", "fp8_autocast", "autocast", "quantized_model_init"}


def _layer(name: str) -> Any:
    import torch

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        torch.nn.Module.__init__(self)
        self.tp_size = kwargs.get("tp_size", 1)
        if name == "DotProductAttention":
            return
        gemms = range(kwargs.get("num_gemms", args[0] if args else 0)) if name == "GroupedLinear" else [""]
        for index in gemms:
            for part in ("weight", "bias", "layer_norm_weight", "layer_norm_bias"):
                setattr(self, f"{part}{index}", torch.nn.Parameter(torch.empty(0)))

    __init__.__qualname__ = f"{STAND_IN}{name}.__init__"
    # Megatron looks for keywords of TE's constructors before it passes them.
    body = {"__init__": __init__, "save_original_input": False, "use_bias": False, "is_stand_in": True}
    return type(f"{STAND_IN}{name}", (torch.nn.Module,), body)


class FusedAdam:
    """Has the arguments that Megatron looks for in the signature of Transformer Engine's optimizer."""

    is_stand_in = True

    def __init__(
        self,
        params: Any = None,
        master_weight_dtype: Any = None,
        exp_avg_dtype: Any = None,
        exp_avg_sq_dtype: Any = None,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        **kwargs: Any,
    ) -> None:
        self.param_groups = list(params or [])
        self.state: dict[Any, Any] = {}
        self.defaults: dict[str, Any] = kwargs

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state, "param_groups": self.param_groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class StandInModule(types.ModuleType):
    """A module that has every attribute."""

    __path__ = []  # type: ignore[assignment] # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any
        if self.__name__.startswith(_WITH_LAYERS) and name in _LAYERS:
            made = _layer(name)
        elif name == "FusedAdam":
            made = FusedAdam
        elif name in _CONTEXTS:
            made = _no_context
        elif name == "get_cpu_offload_context":
            made = _no_offload
        else:
            made = stand_in_class(name)
        setattr(self, name, made)
        return made


def _no_context(*args: Any, **kwargs: Any) -> Any:
    return contextlib.nullcontext()


def _no_offload(*args: Any, **kwargs: Any) -> Any:
    return contextlib.nullcontext(), lambda tensor: tensor


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins before the packages that they stand in for; `used` are those that were imported."""

    def __init__(self, te_version: str) -> None:
        self.versions = {**_VERSIONS, "transformer_engine": te_version}
        self.packages = _NEED_CUDA | _NO_PART | {name for name in _OPTIONAL if not _is_installed(name)}
        self.used: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        for name in self.packages:
            if fullname == name or fullname.startswith(name + "."):
                self.used.add(name)
                return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = StandInModule(spec.name)
        module.__version__ = self.versions.get(spec.name, "99.0.0")  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # a parent that is not installed
        return False


def install_stand_ins(megatron: str | None, te_version: str) -> StandInFinder:
    """Make Megatron importable: from a folder of unpacked wheels, or as it is installed."""
    if megatron is not None:
        sys.path.insert(0, megatron)
    if not hasattr(typing, "override"):  # Python 3.12 has it; Megatron imports it on any Python
        typing.override = lambda method: method  # type: ignore[attr-defined]
    finder = StandInFinder(te_version)
    sys.meta_path.insert(0, finder)
    return finder
