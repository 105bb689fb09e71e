"""Prompts with images: the tokens, patches and positions that a model reads before it answers.

`sample.py` makes one from a text or chat and from files. A prompt goes the way of training data: the same turns,
tokens, resizing and patches (`data/images/`), one file at a time and without a cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from threefold.engine.batch import Batch, Images
from threefold.engine.data.images.batch_images import BatchImages
from threefold.engine.data.images.decode import BadImageError, DecodePool, ImageFile, image_size, require_pillow
from threefold.engine.data.images.encode_record import RecordEncoder
from threefold.engine.data.images.image_source import ImageSample, sample_image
from threefold.engine.data.images.patches import PatchRules
from threefold.engine.data.images.records import RawRecord, RecordError, Turn, parse_turns
from threefold.engine.data.text.tokenizer import Tokenizer
from threefold.findings import Finding, FindingsError
from threefold.spec.model import VisionTokens


@dataclass(frozen=True)
class ImagePrompt:
    """One prompt, which may have no image."""

    tokens: list[int]
    images: Images | None  # `token_index_V` among the tokens of the prompt
    positions_3S: Tensor


@dataclass(frozen=True)
class JoinedPrompts:
    """The images of a batch of prompts that are padded to one length."""

    images: Images | None
    axes_3BS: Tensor
    offsets: list[int]  # of the position after each prompt from its length


def join_prompts(prompts: Sequence[ImagePrompt | None], lengths: Sequence[int]) -> JoinedPrompts:
    """Put prompts below each other; those without images are None, and count their tokens. Padding counts on."""
    length, axes, offsets, rows = max(lengths), [], [], list[Images]()
    for number, (prompt, own) in enumerate(zip(prompts, lengths, strict=True)):
        axes_3S = torch.arange(own).expand(3, own) if prompt is None else prompt.positions_3S
        end = int(axes_3S.max()) + 1
        axes.append(torch.cat([axes_3S, torch.arange(end, end + length - own).expand(3, -1)], dim=1))
        offsets.append(end - own)
        if prompt is not None and prompt.images is not None:
            rows.append(prompt.images._replace(token_index_V=prompt.images.token_index_V + number * length))
    images = Images(*(torch.cat(parts) for parts in zip(*rows, strict=True))) if rows else None
    return JoinedPrompts(images, torch.stack(axes, dim=1), offsets)


def make_image_prompt(
    tokenizer: Tokenizer,
    vision_tokens: VisionTokens,
    rules: PatchRules,
    prompt: str | list[dict[str, Any]],
    files: Sequence[Path],
) -> ImagePrompt:
    """A text to continue, or the messages of a chat to answer, with images where training data has them.

    Images stand in the place of `<image>`, or where there is none before the text or before the first question.
    Raises FindingsError for an image that cannot be used, or more places than images.
    """
    require_pillow()
    encoder = RecordEncoder(tokenizer, vision_tokens, rules, lambda file: image_size(file.read()))
    try:
        document = encoder.prompt(_turns(prompt, files))
    except (RecordError, BadImageError) as problem:
        raise _refused(", ".join(map(str, files)) or "--chat", str(problem)) from None
    images = tuple(sample_image(image, rules) for image in document.images)
    tokens_S = np.concatenate([*document.tokens, np.empty(0, np.int64)])
    sample = ImageSample(tokens_S, tokens_S, starts=(0,), images=images)
    tokens_1S = torch.from_numpy(tokens_S)[None]
    batch_images = BatchImages(rules, vision_tokens, DecodePool(0))
    batch = batch_images.add(Batch(tokens_1S, tokens_1S.clone()), [sample])
    for place, reason in batch_images.bad.items():
        raise _refused(place, reason)
    assert batch.positions_3BS is not None
    return ImagePrompt(tokens_S.tolist(), batch.images, batch.positions_3BS[:, 0])


def _turns(prompt: str | list[dict[str, Any]], files: Sequence[Path]) -> list[Turn]:
    named: dict[str, Any] = {"images": [str(file) for file in files]} if files else {}
    if isinstance(prompt, str):
        return parse_turns(RawRecord("--prompt", named | {"text": prompt}, ImageFile))
    # Records have an answer; that of a prompt is still to come.
    messages = [*prompt, {"role": "assistant", "content": ""}]
    return parse_turns(RawRecord("--chat", named | {"messages": messages}, ImageFile))[:-1]


def _refused(at: str, problem: str) -> FindingsError:
    advice = "docs/reference/image-data.md says which images are read, and where they stand"
    return FindingsError([Finding(rule="pictures-readable", at=at, problem=problem, advice=advice)])
