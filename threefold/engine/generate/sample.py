"""Text from a run: continue prompts or answer chats, with the run's own tokenizer. `threefold sample` calls it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from threefold.engine.data.images.patches import patch_rules
from threefold.engine.data.text.chat_template import chat_prompt
from threefold.engine.data.text.chatml import END, ChatError
from threefold.engine.data.text.tokenizer import FileTokenizer, Tokenizer, open_tokenizer
from threefold.engine.generate.generate import Sampling, generate
from threefold.engine.generate.image_prompt import ImagePrompt, make_image_prompt
from threefold.engine.models.decoder import Decoder
from threefold.engine.weights.convert import tokenizer_folder
from threefold.engine.weights.run_files import end_tokens
from threefold.findings import Finding, FindingsError
from threefold.plan.plan import Plan
from threefold.spec.model import ModelSpec

Prompt = str | list[dict[str, Any]]  # text to continue, or the messages of a chat to answer
_CONTEXT = 8  # tokens before new ones that their text may depend on, as for a space or a letter of several bytes
_UNFINISHED = "\ufffd"  # what a letter decodes to of which tokens are still to come


def run_tokenizer(run: Path, plan: Plan, given: str | None = None) -> Tokenizer:
    """The tokenizer that was asked for, or the one that belongs to the run: its copy, the plan's, or bytes."""
    if given is not None:
        return open_tokenizer(given)
    folder = tokenizer_folder(run, plan)
    if (folder / "tokenizer.json").is_file():
        return open_tokenizer(str(folder))
    return open_tokenizer(plan.job.tokenizer or "bytes")


def run_ends(run: Path, plan: Plan, tokenizer: Tokenizer) -> set[int]:
    """The tokens that end an answer: of the generation settings, of the tokenizer, and the end of a turn in ChatML."""
    named = {tokenizer.end, tokenizer.special(END)} - {None}
    return end_tokens(tokenizer_folder(run, plan)) | {token for token in named if token is not None}


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt, vocab: int) -> list[int]:
    """The tokens of a prompt. Special tokens that a text spells out are those tokens, as its author means them."""
    if not isinstance(prompt, str):
        try:
            tokens = chat_prompt(tokenizer, prompt)
        except ChatError as error:
            advice = '[{"role": "user", "content": "..."}]'
            raise FindingsError(
                [Finding(rule="chat-readable", at="--chat", problem=str(error), advice=advice)]
            ) from error
    elif isinstance(tokenizer, FileTokenizer):
        tokens = tokenizer.encode_rendered(prompt)[0]
    else:
        tokens = tokenizer.encode(prompt)
    start = [int(token) for token in tokens] or [tokenizer.end or 0]
    _check_vocab(start, vocab)
    return start


def _check_vocab(tokens: Sequence[int], vocab: int) -> None:
    if max(tokens) >= vocab:
        problem = f"token {max(tokens)} of the prompt is beyond the model's vocabulary of {vocab}"
        advice = "give the tokenizer that the run's data was made with"
        raise FindingsError([Finding(rule="prompt-fits-vocab", at="--tokenizer", problem=problem, advice=advice)])


def encode_image_prompts(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], spec: ModelSpec, files: Sequence[Path], max_pixels: int | None
) -> list[ImagePrompt]:
    """Prompts about images, as the training data of a vision-language model has them; each gets all files."""
    vision = spec.vision
    if vision is None:
        problem, advice = f"{spec.name} has no vision part", "give a run of a vision-language model, or no --image"
        raise FindingsError([Finding(rule="images-need-vision", at="--image", problem=problem, advice=advice)])
    rules = patch_rules(vision, max_pixels)
    encoded = [make_image_prompt(tokenizer, vision.tokens, rules, prompt, files) for prompt in prompts]
    for prompt in encoded:
        _check_vocab(prompt.tokens, spec.vocab)
    return encoded


def _refuse_missing_images(prompts: Sequence[Prompt]) -> None:
    """Raise where a prompt has a place for an image and none is given: the model would read `<image>` as text."""
    for number, prompt in enumerate(prompts, start=1):
        if _has_image_place(prompt):
            problem = f"prompt {number} has a place for an image, <image>, and no image is given"
            advice = "add --image FILE, or take <image> out of the prompt"
            raise FindingsError([Finding(rule="pictures-readable", at="--image", problem=problem, advice=advice)])


def _has_image_place(content: Any) -> bool:
    """Return whether a text, the parts of a turn or the messages of a chat have `<image>` or a part of the type
    image."""
    if isinstance(content, list):
        return any(_has_image_place(part) for part in content)
    if isinstance(content, dict):
        return content.get("type") == "image" or any(_has_image_place(content.get(key)) for key in ("content", "text"))
    return isinstance(content, str) and "<image>" in content


def sample_texts(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    max_tokens: int,
    sampling: Sampling | None = None,
    ends: set[int] | None = None,
    images: Sequence[Path] = (),
    max_pixels: int | None = None,
) -> Iterator[list[str]]:
    """The texts that continue each prompt, piece by piece: for each step a text a prompt, often an empty one.

    `images` are images that every prompt is about, of at most `max_pixels` as in training.
    """
    if model.spec.vision is not None and not images:
        _refuse_missing_images(prompts)
    image_prompts = encode_image_prompts(tokenizer, prompts, model.spec, images, max_pixels) if images else None
    encoded = [prompt.tokens for prompt in image_prompts or ()]
    encoded = encoded or [encode_prompt(tokenizer, prompt, model.spec.vocab) for prompt in prompts]
    ends = ends or set()
    streams = [TextStream(tokenizer) for _ in prompts]
    for tokens in generate(model, encoded, max_tokens, sampling, ends, image_prompts):
        pairs = zip(streams, tokens, strict=True)
        yield [stream.add(token) if token is not None and token not in ends else "" for stream, token in pairs]
    yield [stream.rest() for stream in streams]


@dataclass
class TextStream:
    """Turns tokens into text as they come. A letter whose bytes are not complete waits for the next token."""

    tokenizer: Tokenizer
    context: list[int] = field(default_factory=list)  # the last tokens whose text was given
    pending: list[int] = field(default_factory=list)

    def add(self, token: int) -> str:
        """The text that is certain with this token; empty where it still depends on the next one."""
        self.pending.append(token)
        text = self._new_text()
        if text.endswith(_UNFINISHED) and len(self.pending) < _CONTEXT:
            return ""
        return self._give(text)

    def rest(self) -> str:
        return self._give(self._new_text()) if self.pending else ""

    def _new_text(self) -> str:
        before = self.tokenizer.decode(self.context)
        return self.tokenizer.decode([*self.context, *self.pending])[len(before) :]

    def _give(self, text: str) -> str:
        self.context, self.pending = [*self.context, *self.pending][-_CONTEXT:], []
        return text
