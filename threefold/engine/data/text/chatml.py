"""Conversations as records have them, and ChatML, the template of tokenizers that have none; it needs no jinja2.

    <|im_start|>user\\nWhat is 2 + 2?<|im_end|>\\n
    <|im_start|>assistant\\n4<|im_end|>\\n
                           ^^^^^^^^^^^ learned

`chat_template.py` calls it. A tokenizer without these special tokens spells <|im_start|> as text and ends a turn with
its end-of-text token. The reasoning of a turn is written between <think> and </think>, its tool calls as JSON between
<tool_call> and </tool_call>, and the tools of a conversation as JSON in its system turn.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from threefold.engine.data.text.tokenizer import Tokenizer, Tokens

ASSISTANT = "assistant"
REASONING = ("reasoning_content", "thinking", "reasoning")  # names that records have for it; the first is the usual one
ChatSample = tuple[Tokens, NDArray[np.uint8]]  # tokens, and a mask that is 1 for each token that is learned


class ChatError(ValueError):
    """A record is no conversation that can be rendered; the message says why."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of one chat in OpenAI's form, and what else a template is given."""

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


ROLES = ("system", "user", ASSISTANT, "tool")
START, END = "<|im_start|>", "<|im_end|>"


def encode_chatml(tokenizer: Tokenizer, chat: Conversation) -> ChatSample:
    """The tokens of a conversation, and a mask that is 1 for each token that is learned."""
    learned_turns = set(chat.learned_turns)
    parts: list[tuple[Tokens, int]] = []
    for number, (role, text) in enumerate(_turns(chat)):
        learned = number - (len(_turns(chat)) - len(chat.messages)) in learned_turns
        parts.append((_turn_start(tokenizer, role), 0))
        parts.append((np.append(tokenizer.encode(text), _turn_end(tokenizer)), int(learned)))
        parts.append((tokenizer.encode("\n"), 0))
    masks = [np.full(len(tokens), learned, np.uint8) for tokens, learned in parts]
    return np.concatenate([tokens for tokens, _ in parts]), np.concatenate(masks)


def chatml_prompt(tokenizer: Tokenizer, chat: Conversation) -> Tokens:
    """The tokens of a conversation up to and including the start of the assistant's next turn."""
    newline = tokenizer.encode("\n")
    parts = []
    for role, text in _turns(chat):
        parts += [_turn_start(tokenizer, role), tokenizer.encode(text), _turn_end(tokenizer), newline]
    return np.concatenate([*parts, _turn_start(tokenizer, ASSISTANT)])


def _turns(chat: Conversation) -> list[tuple[str, str]]:
    """Role and text of each turn; one more at the start where tools need a system turn of their own."""
    turns = [_parse_turn(message) for message in chat.messages]
    if not chat.tools:
        return turns
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in chat.tools)
    tools = f"Tools that can be called:\n{listed}"
    if turns[0][0] == "system":
        return [("system", f"{turns[0][1]}\n\n{tools}"), *turns[1:]]
    return [("system", tools), *turns]


def _parse_turn(message: dict[str, Any]) -> tuple[str, str]:
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if role not in ROLES:
        raise ChatError(f"a turn has a role of {', '.join(ROLES)}")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise ChatError(f"the content of a turn is text, not {type(content).__name__}")
    if calls:
        content = "\n".join(filter(None, [content, *map(_call_text, calls)])) if isinstance(calls, list) else content
    reasoning = reasoning_of(message)
    if role == ASSISTANT and isinstance(reasoning, str) and reasoning:
        content = f"<think>\n{reasoning}\n</think>\n\n{content}"
    return str(role), content


def _call_text(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ChatError("a tool call has a name and arguments")
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {text}}}\n</tool_call>'


def _turn_start(tokenizer: Tokenizer, role: str) -> Tokens:
    start = tokenizer.special(START)
    if start is None:
        return tokenizer.encode(f"{START}{role}\n")
    return np.concatenate([[start], tokenizer.encode(f"{role}\n")])


def _turn_end(tokenizer: Tokenizer) -> Tokens:
    closing = tokenizer.special(END)
    closing = tokenizer.end if closing is None else closing
    return tokenizer.encode(END) if closing is None else np.array([closing], np.int64)
