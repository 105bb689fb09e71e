"""Tokenizers: bytes, or a Hugging Face `tokenizer.json`. `open_tokenizer` makes the one of a name or path."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from threefold.engine.data.text.tokenizer_files import (
    MAX_TOKENIZER_BYTES,
    TOKENIZER,
    TokenizerSettings,
    check_bounded,
    read_tokenizer_settings,
)
from threefold.findings import Finding, FindingsError
from threefold.safe_files import read_bounded

Tokens = NDArray[np.int64]
Offsets = NDArray[np.int64]  # first character of each token, and the one after its last, as rows

# Special tokens come after the 256 bytes. Encoding a text never makes one of them.
BYTE_SPECIALS = {"<|endoftext|>": 256, "<|pad|>": 257, "<|im_start|>": 258, "<|im_end|>": 259}
MAX_VOCAB = 2**31
# Names of end-of-text tokens that are tried if tokenizer_config.json states none.
KNOWN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "<|im_end|>")  # noqa: RUF001


class Tokenizer(Protocol):
    """The interface that tokenizing and sampling need."""

    label: str  # identifies the tokenizer in shards; shards with different labels are not mixed
    vocab: int
    end: int | None  # the token that ends a document
    settings: TokenizerSettings  # special tokens by role, and chat templates

    def encode(self, text: str) -> Tokens: ...

    def encode_all(self, texts: Sequence[str]) -> Iterator[Tokens]: ...

    def encode_completion(self, prompt: str, completion: str) -> tuple[Tokens, NDArray[np.uint8]]:
        """The tokens of a prompt with its completion, and 1 for each that has some of the completion."""

    def decode(self, tokens: Sequence[int]) -> str: ...

    def special(self, name: str) -> int | None: ...


class ByteTokenizer:
    """One token for each byte of UTF-8, and four special tokens."""

    label = "bytes"
    vocab = 256 + len(BYTE_SPECIALS)
    end: int | None = BYTE_SPECIALS["<|endoftext|>"]
    settings = TokenizerSettings()

    def encode(self, text: str) -> Tokens:
        # JSON can contain half a surrogate pair, which UTF-8 cannot encode; it becomes a question mark.
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int64)

    def encode_all(self, texts: Sequence[str]) -> Iterator[Tokens]:
        return map(self.encode, texts)

    def encode_completion(self, prompt: str, completion: str) -> tuple[Tokens, NDArray[np.uint8]]:
        parts = self.encode(prompt), self.encode(completion)
        return np.concatenate(parts), np.repeat(np.array([0, 1], np.uint8), [len(part) for part in parts])

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")

    def special(self, name: str) -> int | None:
        return BYTE_SPECIALS.get(name)


class FileTokenizer:
    """A `tokenizer.json`. Special tokens that are spelled out in a text stay text, so that data cannot forge them."""

    def __init__(self, path: str | Path, end: str | None = None) -> None:
        """`end` names the token that ends a document; None takes that of tokenizer_config.json, or a known name."""
        self.path = Path(path)
        try:
            raw = read_bounded(self.path, MAX_TOKENIZER_BYTES)
        except OSError as error:
            raise _refused(self.path, f"cannot be read: {error.strerror or error}") from error
        with self._reading():
            check_bounded(raw)
            self._inner = _load(self.path, raw)
            self._inner.no_truncation()
            self._inner.no_padding()
            self._inner.encode_special_tokens = True
            self.vocab = max(self._inner.get_vocab(with_added_tokens=True).values(), default=0) + 1
        self.label = f"hf-{hashlib.sha256(raw).hexdigest()[:16]}"
        if self.vocab > MAX_VOCAB:
            raise _refused(self.path, f"it has a token {self.vocab - 1}, past all vocabularies")
        self.settings = read_tokenizer_settings(self.path.parent)
        self.end = self._find_end(end)

    def encode(self, text: str) -> Tokens:
        with self._reading():
            return np.array(self._inner.encode(_valid_utf8(text), add_special_tokens=False).ids, np.int64)

    def encode_all(self, texts: Sequence[str]) -> Iterator[Tokens]:
        """Encode many texts at once, for which the library uses all cores."""
        with self._reading():
            encoded = self._inner.encode_batch([_valid_utf8(text) for text in texts], add_special_tokens=False)
        return (np.array(encoding.ids, np.int64) for encoding in encoded)

    def encode_completion(self, prompt: str, completion: str) -> tuple[Tokens, NDArray[np.uint8]]:
        prompt = _valid_utf8(prompt)
        tokens, offsets = self.encode_spelled(prompt + _valid_utf8(completion))
        return tokens, (offsets[:, 1] > len(prompt)).astype(np.uint8)

    def encode_rendered(self, text: str) -> tuple[Tokens, Offsets]:
        """Tokens of a rendered chat, in which special tokens that are spelled out are these tokens, and their place."""
        with self._reading():
            self._inner.encode_special_tokens = False
            try:
                encoding = self._inner.encode(_valid_utf8(text), add_special_tokens=False)
            finally:
                self._inner.encode_special_tokens = True
        return np.array(encoding.ids, np.int64), np.array(encoding.offsets, np.int64).reshape(-1, 2)

    def encode_spelled(self, text: str) -> tuple[Tokens, Offsets]:
        """Tokens of a text, in which special tokens that are spelled out stay text, and their place."""
        with self._reading():
            encoding = self._inner.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int64), np.array(encoding.offsets, np.int64).reshape(-1, 2)

    @cached_property
    def special_names(self) -> dict[str, int]:
        """The special tokens of the file and their numbers."""
        added = self._inner.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    @cached_property
    def special_numbers(self) -> dict[int, str]:
        return {number: name for name, number in self.special_names.items()}

    def decode(self, tokens: Sequence[int]) -> str:
        with self._reading():
            return str(self._inner.decode(list(tokens), skip_special_tokens=True))

    def special(self, name: str) -> int | None:
        token: int | None = self._inner.token_to_id(name)
        return token

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn what the library raises, for which it has no type of its own, into a finding. It may also panic."""
        try:
            yield
        except FindingsError:
            raise
        except BaseException as error:
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise _refused(self.path, f"this is no tokenizer that works: {str(error)[:200]}") from error
            raise

    def _find_end(self, name: str | None) -> int | None:
        if name is not None:
            if (token := self.special(name)) is None:
                raise _refused(self.path, f"it has no token {name!r} to end documents with", "name a token that it has")
            return token
        names = (self.settings.special_tokens.get("eos_token"), *KNOWN_ENDS)
        return next((token for name in names if name and (token := self.special(name)) is not None), None)


def open_tokenizer(name: str, end: str | None = None) -> Tokenizer:
    """`bytes`, or the path of a tokenizer.json or of a folder that holds one."""
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name)
    return FileTokenizer(path / TOKENIZER if path.is_dir() else path, end)


def tokenizer_facts(tokenizer: Tokenizer) -> dict[str, Any]:
    """Facts that identify a tokenizer and its chat templates, wherever they lie, for the contract of a run."""
    return {"label": tokenizer.label, "vocab": tokenizer.vocab, "chat_template": tokenizer.settings.template_digest}


def _load(path: Path, raw: bytes) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        problem, advice = "the tokenizers library is not installed", "pip install threefold[train], or use bytes"
        raise FindingsError(
            [Finding(rule="tokenizers-installed", at=str(path), problem=problem, advice=advice)]
        ) from error
    return tokenizers.Tokenizer.from_buffer(raw)


def _valid_utf8(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def _refused(path: Path, problem: str, advice: str = "") -> FindingsError:
    advice = advice or "give bytes, or the tokenizer.json of a Hugging Face model"
    return FindingsError([Finding(rule="tokenizer-readable", at=str(path), problem=problem, advice=advice)])
