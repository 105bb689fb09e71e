"""Encodes a record as one document: its tokens, which of them are learned, and where its images stand.

Conversations are written in ChatML. An image is <|vision_start|>, one <|image_pad|> for each merge x merge patches,
<|vision_end|>. A video is one such piece for each pair of frames, after the mean of their timestamps as text: `<0.3
seconds>`. Answers of the assistant are learned; of a document without turns all text is. Tokens of
images never are. `image_index.py` calls `encode_record`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from threefold.engine.data.images.decode import ImageFile
from threefold.engine.data.images.patches import ImageSizeError, PatchRules, resized_frames, resized_image
from threefold.engine.data.images.records import ImagePart, RecordError, Turn, VideoPart
from threefold.engine.data.text.tokenizer import Tokenizer
from threefold.spec.model import VisionTokens

START, END = "<|im_start|>", "<|im_end|>"
SizeOf = Callable[[ImageFile], tuple[int, int]]  # height and width of an image; raises BadImageError


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image of a document: an image, or the frames of one temporal patch of a video."""

    files: tuple[ImageFile, ...]
    first_token: int  # where its tokens begin in the document
    grid: tuple[int, int]  # height and width in patches


@dataclass(slots=True)
class EncodedRecord:
    """One document."""

    tokens: list[NDArray[np.int64]] = field(default_factory=list)
    masks: list[NDArray[np.uint8]] = field(default_factory=list)
    images: list[PlacedImage] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, tokens: NDArray[np.int64], learned: bool) -> None:
        self.tokens.append(tokens)
        self.masks.append(np.full(len(tokens), learned, np.uint8))
        self.num_tokens += len(tokens)


class RecordEncoder:
    """Encodes records for one model: its tokenizer, the ids of its vision tokens, and its patch rules."""

    def __init__(self, tokenizer: Tokenizer, vision_tokens: VisionTokens, rules: PatchRules, size_of: SizeOf) -> None:
        self.tokenizer, self.vision_tokens, self.rules, self.size_of = tokenizer, vision_tokens, rules, size_of

    def encode(self, turns: list[Turn]) -> EncodedRecord:
        """The document of a record. Raises RecordError, or BadImageError for an image of it."""
        document = EncodedRecord()
        for turn in turns:
            learned = turn.role in (None, "assistant")
            if turn.role is not None:
                document.add(self._turn_start(turn.role), learned=False)
            for part in turn.parts:
                self._add_part(document, part, learned)
            if turn.role is not None:
                document.add(self._turn_end(), learned)
                document.add(self.tokenizer.encode("\n"), learned=False)
            elif self.tokenizer.end is not None:
                document.add(np.array([self.tokenizer.end], np.int64), learned)
        return document

    def prompt(self, turns: list[Turn]) -> EncodedRecord:
        """The document from which an answer is sampled: up to and including the start of the assistant's next turn, or
        without turns all of it but its end."""
        if [turn.role for turn in turns] == [None]:
            document = EncodedRecord()
            for part in turns[0].parts:
                self._add_part(document, part, learned=False)
            return document
        document = self.encode(turns)
        document.add(self._turn_start("assistant"), learned=False)
        return document

    def _add_part(self, document: EncodedRecord, part: str | ImagePart | VideoPart, learned: bool) -> None:
        if isinstance(part, str):
            document.add(self.tokenizer.encode(part), learned)
            return
        try:
            if isinstance(part, ImagePart):
                size = resized_image(self.size_of(part.file), self.rules)
                self._add_image(document, (part.file,), size, self.vision_tokens.image)
            else:
                self._add_video(document, part, learned)
        except ImageSizeError as problem:
            raise RecordError(str(problem)) from None

    def _add_video(self, document: EncodedRecord, video: VideoPart, learned: bool) -> None:
        sizes = {self.size_of(file) for file in video.files}
        if len(sizes) > 1:
            raise RecordError("the frames of a video have different sizes")
        size = resized_frames(len(video.files), sizes.pop(), self.rules)
        each = self.rules.temporal_patch
        missing = -len(video.files) % each  # the last frame is repeated
        files = video.files + video.files[-1:] * missing
        times = video.timestamps + video.timestamps[-1:] * missing
        for first in range(0, len(files), each):
            seconds = (times[first] + times[first + each - 1]) / 2
            document.add(self.tokenizer.encode(f"<{seconds:.1f} seconds>"), learned)
            self._add_image(document, files[first : first + each], size, self.vision_tokens.video)

    def _add_image(
        self, document: EncodedRecord, files: tuple[ImageFile, ...], size: tuple[int, int], token: int
    ) -> None:
        grid = self.rules.grid(size)
        document.add(np.array([self.vision_tokens.start], np.int64), learned=False)
        document.images.append(PlacedImage(files, document.num_tokens, grid))
        document.add(np.full(self.rules.num_tokens(grid), token, np.int64), learned=False)
        document.add(np.array([self.vision_tokens.end], np.int64), learned=False)

    def _turn_start(self, role: str) -> NDArray[np.int64]:
        start = self.tokenizer.special(START)
        if start is None:
            return self.tokenizer.encode(f"{START}{role}\n")
        return np.concatenate([[start], self.tokenizer.encode(f"{role}\n")])

    def _turn_end(self) -> NDArray[np.int64]:
        closing = self.tokenizer.special(END)
        closing = self.tokenizer.end if closing is None else closing
        return self.tokenizer.encode(END) if closing is None else np.array([closing], np.int64)
