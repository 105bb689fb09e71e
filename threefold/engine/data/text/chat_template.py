"""Encodes conversations in the ChatML template, with a loss mask: only the assistant's answers are learned.

    <|im_start|>user\\nWhat is 2 + 2?<|im_end|>\\n
    <|im_start|>assistant\\n4<|im_end|>\\n
                           ^^^^^^^^^^^ learned

A tokenizer without these special tokens spells <|im_start|> as text and ends a turn with its end-of-text token.
`tokenize_files` calls `encode_chat`; `threefold sample` calls `chat_prompt`.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from threefold.engine.data.text.tokenizer import Tokenizer, Tokens

ROLES = ("system", "user", "assistant", "tool")
START, END = "<|im_start|>", "<|im_end|>"


class ChatError(ValueError):
    """A record is no conversation; the message says why."""


def encode_chat(tokenizer: Tokenizer, messages: Any) -> tuple[Tokens, NDArray[np.uint8]]:
    """The tokens of a conversation, and a mask that is 1 for each token that is learned."""
    if not isinstance(messages, list) or not messages:
        raise ChatError("messages is no list of turns")
    parts: list[tuple[Tokens, int]] = []
    for message in messages:
        role, content = _parse_turn(message)
        parts.append((_turn_start(tokenizer, role), 0))
        parts.append((np.append(tokenizer.encode(content), _turn_end(tokenizer)), int(role == "assistant")))
        parts.append((tokenizer.encode("\n"), 0))
    if not any(learned for _, learned in parts):
        raise ChatError("no turn of the assistant: nothing to learn")
    masks = [np.full(len(tokens), learned, np.uint8) for tokens, learned in parts]
    return np.concatenate([tokens for tokens, _ in parts]), np.concatenate(masks)


def chat_prompt(tokenizer: Tokenizer, messages: Any) -> Tokens:
    """The tokens of a conversation up to and including the start of the assistant's next turn."""
    turns = [_parse_turn(message) for message in messages]
    parts = [
        part
        for role, content in turns
        for part in (
            _turn_start(tokenizer, role),
            tokenizer.encode(content),
            _turn_end(tokenizer),
            tokenizer.encode("\n"),
        )
    ]
    return np.concatenate([*parts, _turn_start(tokenizer, "assistant")])


def _parse_turn(message: Any) -> tuple[str, str]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise ChatError(f"a turn has a role of {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise ChatError(f"the content of a turn is text, not {type(content).__name__}")
    return str(message["role"]), content


def _turn_start(tokenizer: Tokenizer, role: str) -> Tokens:
    start = tokenizer.special(START)
    if start is None:
        return tokenizer.encode(f"{START}{role}\n")
    return np.concatenate([[start], tokenizer.encode(f"{role}\n")])


def _turn_end(tokenizer: Tokenizer) -> Tokens:
    closing = tokenizer.special(END)
    closing = tokenizer.end if closing is None else closing
    return tokenizer.encode(END) if closing is None else np.array([closing], np.int64)
