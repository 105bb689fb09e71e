"""Conversations to tokens with a loss mask, by the template of the tokenizer, or ChatML where it has none.

`tokenize_files` calls `encode_chat`, `threefold sample` calls `chat_prompt`. Where the template has `{% generation %}`,
its bodies are learned. Elsewhere an answer is what the rendering has with it and not without it:

    rendered up to the answer, with the start of an answer   <|im_start|>user ... <|im_start|>assistant\\n
    rendered with the answer                                 <|im_start|>user ... <|im_start|>assistant\\n4<|im_end|>\\n
                                                                                                         ^^^^^^^^^^^

Some templates render a turn otherwise when others follow, for instance without its reasoning. Then no single text has
all answers as they were given, and each answer becomes a sample of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from threefold.engine.data.text.chatml import (
    ASSISTANT,
    ChatError,
    ChatSample,
    Conversation,
    chatml_prompt,
    check_messages,
    encode_chatml,
)
from threefold.engine.data.text.jinja_template import ChatTemplate, Rendered, Span
from threefold.engine.data.text.tokenizer import FileTokenizer, Offsets, Tokenizer, Tokens
from threefold.engine.data.text.tokenizer_files import DEFAULT, TOOL_USE


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """The samples of one conversation: one, or one for each answer where `by_turn` is set."""

    samples: list[ChatSample]
    by_turn: bool = False


def encode_chat(tokenizer: Tokenizer, chat: Conversation) -> EncodedChat:
    """Tokens and masks of a conversation. Raises ChatError where it cannot be rendered or has nothing to learn."""
    if not chat.learned_turns:
        raise ChatError("no turn of the assistant: nothing to learn")
    template = template_of(tokenizer, chat.tools)
    if template is None:
        return EncodedChat([encode_chatml(tokenizer, chat)])
    assert isinstance(tokenizer, FileTokenizer)  # others have no template
    whole = template.render(chat.messages, chat.tools, chat.variables)
    if template.marks_answers:
        return EncodedChat([_masked(tokenizer, whole, _spans_of_turns(chat, whole.learned))])
    turns = [_answer(tokenizer, template, chat, turn) for turn in chat.learned_turns]
    if all(whole.text.startswith(rendered.text) for rendered, _ in turns):
        return EncodedChat([_masked(tokenizer, whole, [span for _, span in turns])])
    # A template may leave a turn out, such as a call of a tool that it knows nothing of.
    samples = [_masked(tokenizer, rendered, [span]) for rendered, span in turns if span[0] < span[1]]
    if not samples:
        raise _nothing_to_learn()
    return EncodedChat(samples, by_turn=True)


def chat_prompt(
    tokenizer: Tokenizer,
    messages: Any,
    tools: list[Any] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Tokens:
    """The tokens of a conversation up to and including the start of the assistant's next turn."""
    chat = Conversation(check_messages(messages), tools, dict(variables or {}))
    template = template_of(tokenizer, tools)
    if template is None:
        return chatml_prompt(tokenizer, chat)
    assert isinstance(tokenizer, FileTokenizer)
    return _encode(tokenizer, template.render(chat.messages, tools, chat.variables, answers_next=True))[0]


def template_of(tokenizer: Tokenizer, tools: list[Any] | None = None) -> ChatTemplate | None:
    """The template for a conversation with or without tools; None where the tokenizer has none."""
    templates = tokenizer.settings.templates
    name = TOOL_USE if tools is not None and TOOL_USE in templates else DEFAULT
    if name not in templates or not isinstance(tokenizer, FileTokenizer):
        return None
    return _template(templates[name], tuple(tokenizer.settings.special_tokens.items()), tuple(tokenizer.special_names))


@lru_cache(maxsize=8)
def _template(source: str, variables: tuple[tuple[str, str], ...], special_names: tuple[str, ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(variables), special_names)


def _spans_of_turns(chat: Conversation, spans: tuple[Span, ...]) -> list[Span]:
    """The spans of the learned turns, where the template marks one for each answer; otherwise all of them."""
    answers = [n for n, message in enumerate(chat.messages) if message["role"] == ASSISTANT]
    if len(answers) != len(spans):
        return list(spans)
    return [span for turn, span in zip(answers, spans, strict=True) if turn >= chat.first_learned]


def _answer(tokenizer: FileTokenizer, template: ChatTemplate, chat: Conversation, turn: int) -> tuple[Rendered, Span]:
    """The conversation up to and including one answer, and the place of the answer."""
    rendered = template.render(chat.messages[: turn + 1], chat.tools, chat.variables)
    begin = _answer_start(tokenizer, template, chat, turn, rendered)
    text = rendered.text[begin:].rstrip()
    # What the template writes after the token that ends a turn, a line break as a rule, is not the assistant's.
    ends = text.endswith(tuple(tokenizer.special_names)) if tokenizer.special_names else False
    return rendered, (begin, begin + len(text) if ends else len(rendered.text))


def _answer_start(
    tokenizer: FileTokenizer, template: ChatTemplate, chat: Conversation, turn: int, rendered: Rendered
) -> int:
    before = chat.messages[:turn]
    try:
        prompt = template.render(before, chat.tools, chat.variables, answers_next=True)
    except ChatError:
        if turn == 0:  # many templates look at the first message, and the assistant has the first word
            return 0
        raise
    if rendered.text.startswith(prompt.text):
        return len(prompt.text)
    base = template.render(before, chat.tools, chat.variables)
    if not rendered.text.startswith(base.text):
        return _start_after_last_turn(template, chat, turn, (base.text, prompt.text, rendered.text))
    # The start of an answer may have more than every answer has, such as an opened <think>.
    prompt_tokens, _ = _encode(tokenizer, prompt)
    tokens, offsets = _encode(tokenizer, rendered)
    size = min(len(prompt_tokens), len(tokens))
    differ = np.flatnonzero(prompt_tokens[:size] != tokens[:size])
    same = int(differ[0]) if differ.size else size
    return max(len(base.text), int(offsets[same, 0]) if same < len(tokens) else len(rendered.text))


def _start_after_last_turn(template: ChatTemplate, chat: Conversation, turn: int, texts: tuple[str, str, str]) -> int:
    """The start of an answer whose template renders earlier turns otherwise once it is there: after the turn before.

    `texts`: rendered up to the answer, the same with the start of an answer, and rendered with the answer.
    """
    base, prompt, rendered = texts
    earlier = template.render(chat.messages[: turn - 1], chat.tools, chat.variables).text if turn > 1 else ""
    shared = next(
        (n for n, (a, b) in enumerate(zip(base, earlier, strict=False)) if a != b), min(len(base), len(earlier))
    )
    last_turn = base[shared:]
    at = rendered.rfind(last_turn) if last_turn else -1
    if at < 0:
        raise ChatError("the chat template renders the turn before an answer otherwise when it follows")
    start = at + len(last_turn)
    opening = prompt[len(base) :] if prompt.startswith(base) else ""
    return start + len(opening) if rendered.startswith(opening, start) else start


def _masked(tokenizer: FileTokenizer, rendered: Rendered, spans: list[Span]) -> ChatSample:
    tokens, offsets = _encode(tokenizer, rendered)
    mask = np.zeros(len(tokens), np.uint8)
    for begin, end in spans:
        mask[(offsets[:, 0] < end) & (offsets[:, 1] > begin)] = 1
    if not mask.any():
        raise _nothing_to_learn()
    return tokens, mask


def _nothing_to_learn() -> ChatError:
    return ChatError("the chat template renders no answer of the assistant: nothing to learn")


def _encode(tokenizer: FileTokenizer, rendered: Rendered) -> tuple[Tokens, Offsets]:
    """Tokens of a rendered chat and their places. Special tokens that messages forge stay text."""
    ids, places, at = [], [], 0
    for begin, end in [*rendered.forged, (len(rendered.text), len(rendered.text))]:
        for part, is_forged in (((at, begin), False), ((max(at, begin), end), True)):
            tokens, offsets = _encode_part(tokenizer, rendered.text[slice(*part)], is_forged, part[0] > 0)
            ids.append(tokens)
            places.append(offsets + part[0])
        at = max(at, end)
    return np.concatenate(ids), np.concatenate(places)


def _encode_part(tokenizer: FileTokenizer, text: str, is_forged: bool, inside: bool) -> tuple[Tokens, Offsets]:
    encode = tokenizer.encode_spelled if is_forged else tokenizer.encode_rendered
    # Some tokenizers put a space before the first word of a text; after a line break they do not.
    extra = "\n" if inside and text else ""
    tokens, offsets = encode(extra + text)
    if extra and offsets[0].tolist() == [0, 1] and (len(offsets) == 1 or offsets[1, 0] >= 1):
        tokens, offsets = tokens[1:], offsets[1:] - 1
    elif extra:
        tokens, offsets = encode(text)
    _check_special(tokenizer, text, is_forged, (tokens, offsets))
    return tokens, offsets


def _check_special(tokenizer: FileTokenizer, text: str, is_forged: bool, encoded: tuple[Tokens, Offsets]) -> None:
    """Raise where a special token is made of something else than its own text, as normalizers do, or of forged text."""
    tokens, offsets = encoded
    names = tokenizer.special_numbers
    for place in [place for place, token in enumerate(tokens.tolist()) if token in names]:
        name, made_of = names[int(tokens[place])], text[slice(*offsets[place])]
        if is_forged or made_of.strip() != name.strip():
            raise ChatError(f"the tokenizer makes the special token {name} of the text {made_of!r}")
