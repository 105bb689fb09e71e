"""Vision-language models small enough for a test, and documents with pictures for the engine and transformers.

Patches are random numbers: what they stand for is the image processor's business, not the model's.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from threefold.engine.batch import Images
from threefold.engine.vision import multimodal_positions
from threefold.spec.hf import model_from_dict
from threefold.spec.model import ModelSpec

START, END, IMAGE, VIDEO = 61, 62, 63, 64
MERGE = 2
_TEXT = {
    "hidden_size": 32,
    "vocab_size": 67,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "pad_token_id": None,
}
_VISION = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 3,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": MERGE,
    "num_position_embeddings": 16,
    "out_hidden_size": 32,
}
_IDS = {
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe",
        **_IDS,
        "text_config": {
            **_TEXT,
            "intermediate_size": 48,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
        },
        "vision_config": {**_VISION, "deepstack_visual_indexes": [0, 1]},
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        **_IDS,
        "text_config": {
            **_TEXT,
            "shared_expert_intermediate_size": 20,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 1, 1],
                "partial_rotary_factor": 0.5,
            },
        },
        "vision_config": _VISION,
    },
}
PATCH_WIDTH = 3 * 2 * 4 * 4
Part = int | tuple[int, int] | list[tuple[int, int]]  # so many tokens of text, a picture's grid, or a video's frames


def spec_of(family: str) -> ModelSpec:
    return model_from_dict(CONFIGS[family], name=family, source="test")


class Sample:
    """A microbatch of documents, one a row, each a sequence of parts; rows are padded with text to one length."""

    def __init__(self, rows: Sequence[Sequence[Part]], length: int, vocab: int = START, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows, self.length = rows, length
        self.tokens_BS = torch.randint(0, vocab, (len(rows), length), generator=generator)
        self.labels_BS = torch.randint(0, vocab, (len(rows), length), generator=generator)
        self.labels_BS[:, 0] = -100
        grids: list[tuple[int, int]] = []
        positions, kinds = [], torch.zeros_like(self.tokens_BS)
        for row, parts in enumerate(rows):
            of_row = self._fill(row, parts, kinds)
            grids += of_row
            positions.append(multimodal_positions(self.tokens_BS[row], of_row, (IMAGE, VIDEO), MERGE))
        self.kinds_BS, self.grids = kinds, grids
        self.positions_3BS = torch.stack(positions, dim=1)
        self.patches = [torch.randn(h * w, PATCH_WIDTH, generator=generator) for h, w in grids]

    def _fill(self, row: int, parts: Sequence[Part], kinds: Tensor) -> list[tuple[int, int]]:
        at, grids = 0, []
        for part in parts:
            if isinstance(part, int):
                at += part
                continue
            token, kind, pictures = (IMAGE, 1, [part]) if isinstance(part, tuple) else (VIDEO, 2, part)
            for height, width in pictures:
                count = height * width // MERGE**2
                self.tokens_BS[row, at] = START
                self.tokens_BS[row, at + 1 : at + 1 + count] = token
                kinds[row, at + 1 : at + 1 + count] = kind
                self.tokens_BS[row, at + 1 + count] = END
                at += count + 2
            grids += pictures
        assert at <= self.length, f"row {row} has {at} tokens"
        return grids

    @property
    def images(self) -> Images | None:
        if not self.grids:
            return None
        index_V = (self.kinds_BS != 0).flatten().nonzero().flatten()
        return Images(torch.cat(self.patches), torch.tensor(self.grids), index_V)

    def for_transformers(self) -> dict[str, Tensor]:
        """The arguments of a transformers model: pictures and videos apart, a video as one grid over its frames."""
        found: dict[str, Tensor] = {"input_ids": self.tokens_BS}
        if not self.grids:
            return found
        pictures, videos = _Stack(), _Stack()
        rest = iter(zip(self.grids, self.patches, strict=True))
        for part in (part for parts in self.rows for part in parts if not isinstance(part, int)):
            frames = [part] if isinstance(part, tuple) else part
            taken = [next(rest) for _ in frames]
            stack = pictures if isinstance(part, tuple) else videos
            stack.grids.append((len(frames), *taken[0][0]))
            stack.patches += [patches for _, patches in taken]
        found["mm_token_type_ids"] = self.kinds_BS
        if pictures.grids:
            found |= {"pixel_values": torch.cat(pictures.patches), "image_grid_thw": torch.tensor(pictures.grids)}
        if videos.grids:
            found |= {"pixel_values_videos": torch.cat(videos.patches), "video_grid_thw": torch.tensor(videos.grids)}
        return found


class _Stack:
    def __init__(self) -> None:
        self.grids: list[tuple[int, int, int]] = []
        self.patches: list[Tensor] = []


SAMPLES: dict[str, tuple[list[list[Part]], int]] = {
    "one picture": ([[3, (4, 6), 4]], 16),
    "several, of any size and aspect": ([[1, (2, 2), 2, (6, 4), (2, 8), 1]], 29),
    "none": ([[12]], 12),
    "a batch with and without": ([[2, (4, 4), 5], [20], [(2, 4), 1, (8, 2), 3]], 20),
    "a video": ([[2, [(4, 4), (4, 4), (4, 4)], 3]], 24),
    "pictures and a video": ([[1, (2, 6), 2, [(2, 4), (2, 4)], 1, (4, 4), 2]], 26),
}


def sample(name: str) -> Sample:
    rows, length = SAMPLES[name]
    return Sample(rows, length)
