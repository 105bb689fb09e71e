"""A small package tree with the modules, functions and classes of Megatron that `validate.py` meets.

It takes overrides as they come, and does what a test writes into one of its functions: refuse, hang, eat memory, or
stumble over a stand-in. It knows nothing of verdicts.
"""

from pathlib import Path
from textwrap import dedent, indent

FILES = {
    "core/package_info.py": '__version__ = "0.19.2"\n',
    "bridge/package_info.py": '__version__ = "0.6.2"\n',
    "core/parallel_state.py": """
        _GROUPS = None

        def get_pipeline_model_parallel_rank():
            return 0
        """,
    "core/tensor_parallel/random.py": "class CudaRNGStatesTracker:\n    pass\n",
    "core/num_microbatches_calculator.py": """
        def init_num_microbatches_calculator(rank, rampup, batch, micro_batch, data_parallel, decrease):
            assert batch % (micro_batch * data_parallel) == 0, "global batch size is not divisible"
        """,
    "core/process_groups_config.py": """
        class ProcessGroupCollection:
            @classmethod
            def use_mpu_process_groups(cls):
                return cls()
        """,
    "core/transformer/transformer_block.py": """
        def get_num_layers_to_build(config, vp_stage=None, pp_rank=None):
            return config.num_layers // config.pipeline_model_parallel_size
        """,
    "core/transformer/transformer_config.py": """
        import os
        import time

        import transformer_engine

        class Mixer:
            def __init__(self, width):
                self.width = width

        def validate(cfg):
            model = cfg.model
        FAULT
        """,
    "bridge/__init__.py": """
        import json
        from pathlib import Path
        from types import SimpleNamespace

        class AutoBridge:
            @classmethod
            def from_hf_pretrained(cls, path):
                return cls(json.loads((Path(path) / "config.json").read_text()))

            def __init__(self, config):
                self.config, self.hf_pretrained = config, SimpleNamespace()
        """,
    "bridge/recipes/__init__.py": "",
    "bridge/recipes/qwen/qwen3_moe.py": """
        from types import SimpleNamespace

        from megatron.bridge import AutoBridge

        def qwen3_30b_a3b_pretrain_config():
            config = AutoBridge.from_hf_pretrained("Qwen/Qwen3-30B-A3B").config
            names = ("train", "ddp", "dist", "optimizer", "dataset", "comm_overlap")
            cfg = SimpleNamespace(**{name: SimpleNamespace() for name in names})
            cfg.train.rampup_batch_size = cfg.train.decrease_batch_size_if_needed = None
            cfg.model = SimpleNamespace(num_layers=config["num_hidden_layers"], hidden_size=config["hidden_size"])
            cfg.model.vocab_size = config["vocab_size"]
            cfg.model.provide = lambda pre_process, post_process, vp_stage: None
            return cfg
        """,
    "bridge/training/comm_overlap.py": "CommOverlapConfig = dict\n",
    "bridge/training/gpt_step.py": "forward_step = None\n",
    "bridge/training/pretrain.py": "def pretrain(config, forward_step_func):\n    raise NotImplementedError\n",
    "bridge/training/finetune.py": "def finetune(config, forward_step_func):\n    raise NotImplementedError\n",
    "bridge/training/mixed_precision.py": """
        from types import SimpleNamespace

        def get_mixed_precision_config(name):
            return SimpleNamespace()
        """,
    "bridge/training/initialize.py": "def _initialize_distributed(**settings):\n    pass\n",
    "bridge/training/utils/omegaconf_utils.py": """
        import json
        from types import SimpleNamespace

        def process_config_with_overrides(cfg, cli_overrides):
            for text in cli_overrides:
                path, _, value = text.partition("=")
                group, _, name = path.partition(".")
                try:
                    value = json.loads(value)
                except ValueError:
                    pass
                setattr(cfg.__dict__.setdefault(group, SimpleNamespace()), name, value)
            return cfg
        """,
    "bridge/training/config.py": """
        from megatron.core.transformer.transformer_config import validate

        def runtime_config_update(cfg):
            model = cfg.model
            stages = model.pipeline_model_parallel_size
            cfg.data_parallel_size = 16 // (model.tensor_model_parallel_size * model.context_parallel_size * stages)
            validate(cfg)
        """,
    "bridge/training/flex_dispatcher_backend.py": """
        def apply_flex_dispatcher_backend(model, moe_flex_dispatcher_backend):
            model.moe_token_dispatcher_type = "flex"
            model.moe_flex_dispatcher_backend = moe_flex_dispatcher_backend
        """,
}


def write_fake_megatron(folder: Path, fault: str) -> Path:
    """`fault`: the statements of `validate(cfg)` in core/transformer/transformer_config.py."""
    for name, text in FILES.items():
        path = folder / "megatron" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).replace("FAULT", indent(dedent(fault), "    ")))
    return folder
