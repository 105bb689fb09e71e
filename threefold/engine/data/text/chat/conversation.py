"""A conversation as records have it, before a template renders it: from `records.py` to `chat_template.py`."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from threefold.engine.data.text.tokenizer import Tokens

ASSISTANT = "assistant"
REASONING = ("reasoning_content", "thinking", "reasoning")  # names that records have for it; the first is the usual one
ChatSample = tuple[Tokens, NDArray[np.uint8]]  # tokens, and a mask that is 1 for each token that is learned


class ChatError(ValueError):
    """A record is no conversation that can be rendered; the message says why."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of one chat in OpenAI's form, and what a template is given beside them."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None  # JSON schemas of functions that the assistant may call
    variables: dict[str, Any] = field(
        default_factory=dict
    )  # further variables of the template, such as enable_thinking
    first_learned: int = 0  # answers before this message are context and not learned

    @property
    def learned_turns(self) -> list[int]:
        """The messages that are learned."""
        answers = (n for n, message in enumerate(self.messages) if message["role"] == ASSISTANT)
        return [n for n in answers if n >= self.first_learned]


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of a record. Raises ChatError where they are none."""
    if not isinstance(messages, list) or not messages:
        raise ChatError("messages is no list of turns")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ChatError("a turn is an object with a role and a content")
    return messages


def reasoning_of(message: dict[str, Any]) -> Any:
    """The reasoning of a turn, under whichever name the record has it; None where there is none."""
    return next((message[name] for name in REASONING if message.get(name) is not None), None)
