"""Loss and gradients of a small checkpoint in Megatron, on one process and a CPU: run by Megatron's interpreter.

    python one_step.py VALIDATE.py WHEELS CHECKPOINT TOKENS OUT

The model is the one that Bridge makes of the checkpoint, with Megatron's local layers in place of Transformer
Engine's, in fp32, without fused kernels. The loss is that of the next token; the gradients have MTP's in them. They go
to OUT under their Hugging Face names, by Bridge's own conversion of weights: it cuts and joins, which is the same for
a weight and for its gradient.
"""

import contextlib
import json
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OFF = (  # kernels of Transformer Engine, Apex or Triton, and what only they need
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "bias_activation_fusion",
    "bias_swiglu_fusion",
    "bias_dropout_fusion",
    "apply_rope_fusion",
    "cross_entropy_loss_fusion",
    "persist_layer_norm",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_router_fusion",
    "use_transformer_engine_op_fuser",
    "use_fused_weighted_squared_relu",
    "bf16",
    "fp16",
)


def main() -> None:
    script, wheels, checkpoint, tokens, out = sys.argv[1:]
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # a traced function would ask the GPU for the state of its generator
    judge = runpy.run_path(script, run_name="validate")
    finder = judge["install_stand_ins"](wheels, judge["JOB"]["transformer_engine"])
    with without(finder, "transformer_engine", "transformer_engine_torch"):  # Core then takes its own functions
        import megatron.core.models.gpt.gpt_model
        import megatron.core.transformer.multi_latent_attention  # noqa: F401
    device = judge["Device"](**judge["JOB"]["device"])
    with judge["simulated_machine"](device, 1, 1, 0, current="cpu"):
        step(Path(checkpoint), json.loads(tokens), Path(out))


@contextlib.contextmanager
def without(finder: Any, *packages: str) -> Iterator[None]:
    finder.packages -= set(packages)
    yield
    finder.packages |= set(packages)


def step(checkpoint: Path, tokens: list[list[int]], out: Path) -> None:
    import torch
    from safetensors.torch import save_file

    join()
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(str(checkpoint))
    model = build(bridge)
    bridge.load_hf_weights([model])
    ids = torch.tensor(tokens)
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    positions = torch.arange(inputs.shape[1]).expand_as(inputs)
    length = inputs.shape[1]
    mask = torch.triu(torch.ones(length, length), diagonal=1).bool()[None, None]
    losses = model(inputs, positions, mask, labels=labels)
    loss = losses.float().mean()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        parameter.data = parameter.grad
    exported = bridge.export_hf_weights([model], cpu=True)
    gradients = {name: tensor.clone().contiguous() for name, tensor in exported if "correction_bias" not in name}
    save_file({**gradients, "loss": loss.detach().reshape(1)}, out)


def build(bridge: Any) -> Any:
    import torch
    from megatron.bridge.models import gpt_provider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.process_groups_config import ProcessGroupCollection

    provider = bridge.to_megatron_provider(load_weights=False)
    for name in OFF:
        if hasattr(provider, name):
            setattr(provider, name, False)
    provider.params_dtype = provider.pipeline_dtype = torch.float32
    provider.use_cpu_initialization = True
    provider.hidden_dropout = provider.attention_dropout = 0.0
    provider.moe_token_dispatcher_type = "alltoall"
    provider.moe_router_load_balancing_type, provider.moe_aux_loss_coeff = "none", 0.0
    provider.transformer_impl = "local"
    provider.make_vocab_size_divisible_by = 1
    provider.transformer_layer_spec = local_layers
    gpt_provider.mtp_block_spec = lambda config, vp_stage=None: (
        get_gpt_mtp_block_spec(config, local_layers(config), use_transformer_engine=False)
        if config.mtp_num_layers
        else None
    )
    provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    return provider.provide(pre_process=True, post_process=True)


def local_layers(config: Any, **kwargs: Any) -> Any:
    """Megatron's own layers. Its attention takes values of the keys' size: for MLA it is told of theirs."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class MlaAttention(DotProductAttention):
        def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.hidden_size_per_partition = (v_channels or config.v_head_dim) * config.num_attention_heads

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    if config.multi_latent_attention:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = MlaAttention
    return spec


class Queue:
    """A stream or an event of a machine that does one thing after the other."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: Queue()


def join() -> None:
    """One rank by gloo. Random numbers are not drawn, so that the states of a GPU's generator are not asked for."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import layers
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = Queue
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    # On one rank a reduction is the identity; as a function of autograd its result may not take a bias in place.
    layers.reduce_from_tensor_model_parallel_region = lambda tensor, *args, **kwargs: tensor
    CudaRNGStatesTracker.fork = lambda self, *args, **kwargs: contextlib.nullcontext()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    parallel_state.get_nccl_options = lambda *args, **kwargs: None
    parallel_state.initialize_model_parallel()


if __name__ == "__main__":
    main()
