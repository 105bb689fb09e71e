"""Turns one record of JSONL, Parquet or a saved dataset into a document. `read_documents` calls `parse_record`.

The form of a record follows from its fields:

    {"messages": [{"role": ..., "content": ...}], "tools": [...]}     a chat, as OpenAI has it
    {"conversations": [{"from": "human", "value": ...}]}              a chat, as ShareGPT has it
    {"prompt": ..., "completion": ...}                                texts, or messages; the completion is learned
    {"instruction": ..., "input": ..., "output": ...}                 a question and its answer, as Alpaca has it
    {"text": ...}                                                     plain text
"""

import json
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from threefold.engine.data.text.chatml import ASSISTANT, ChatError, Conversation, check_messages

# Roles of ShareGPT and its descendants, and those of OpenAI.
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "model": ASSISTANT,
    "assistant": ASSISTANT,
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
FUNCTION_CALL = "function_call"  # a turn of ShareGPT in which the assistant calls a tool
COMPLETIONS = ("completion", "response")
PREFERENCES = ("chosen", "rejected", "label")  # fields of answers that people judged
FORMS = "messages, conversations, prompt and completion, instruction and output, or a text"
NAME_FIELD = "another field of text is named by job.text_field=NAME (finetune, eval, tokenize: --field NAME)"


@dataclass(frozen=True, slots=True)
class Document:
    """A text, a prompt with its completion, or a conversation."""

    at: str  # the file, with the line or row of a record
    text: str = ""
    completion: str | None = None  # learned after `text`, which is its prompt
    chat: Conversation | None = None

    @property
    def num_characters(self) -> int:
        return len(self.text) + len(self.completion or "")


class RecordError(ValueError):
    """A record has none of the known forms; the message says why."""


class PreferenceError(RecordError):
    """A record has answers that people preferred or rejected, which no objective here learns from."""


def check_no_preferences(fields: Container[str], label: Any = None) -> None:
    """Raise for pairs of answers, and for single answers with a verdict, as TRL's DPO and KTO have them.

    Read as other records, what was rejected would be learned.
    """
    if "chosen" in fields and "rejected" in fields:
        raise PreferenceError("a preference pair (chosen, rejected), which no objective here learns from")
    if isinstance(label, bool) and "prompt" in fields and "completion" in fields:
        raise PreferenceError("an answer with a verdict (label), which no objective here learns from")


def parse_record(at: str, record: Any, text_field: str = "text") -> Document:
    """The document of a record. Raises RecordError, or ChatError where a conversation is malformed."""
    if not isinstance(record, dict):
        raise RecordError(f"a record is an object, not {type(record).__name__}")
    if text_field != "text" and text_field in record:
        return _text_document(at, record, text_field)
    check_no_preferences(record, record.get("label"))
    if "messages" in record:
        return Document(at, chat=_conversation(record, check_messages(record["messages"])))
    if "conversations" in record:
        return Document(at, chat=_conversation(record, _sharegpt_messages(record)))
    completion = next((name for name in COMPLETIONS if record.get(name) is not None), None)
    if "prompt" in record and completion:
        return _completion_document(at, record, record[completion])
    if "instruction" in record and "output" in record:
        return Document(at, chat=_conversation(record, _instruction_messages(record)))
    return _text_document(at, record, text_field)


def _text_document(at: str, record: dict[str, Any], text_field: str) -> Document:
    if not isinstance(record.get(text_field), str):
        raise RecordError(f"no text in {text_field!r}, and no {FORMS.replace(', or a text', '')}")
    return Document(at, record[text_field])


def _conversation(record: dict[str, Any], messages: list[dict[str, Any]], first_learned: int = 0) -> Conversation:
    variables = record.get("chat_template_kwargs")
    return Conversation(messages, _tools(record), variables if isinstance(variables, dict) else {}, first_learned)


def _tools(record: dict[str, Any]) -> list[Any] | None:
    tools = record.get("tools")
    if isinstance(tools, str):  # a column of one type holds schemas of many forms as text
        tools = _load_json(tools, "tools is no JSON") if tools.strip() else None
    if tools is not None and not isinstance(tools, list):
        raise ChatError("tools is no list")
    return tools or None


def _load_json(text: str, problem: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ChatError(problem) from error


def _sharegpt_messages(record: dict[str, Any]) -> list[dict[str, Any]]:
    turns = record["conversations"]
    if not isinstance(turns, list) or not turns:
        raise ChatError("conversations is no list of turns")
    system = record.get("system")
    messages: list[dict[str, Any]] = (
        [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    )
    for turn in turns:
        if isinstance(turn, dict) and "from" not in turn and "role" in turn:
            messages += check_messages([turn])
            continue
        speaker, value = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
        if not isinstance(speaker, str) or not isinstance(value, str):
            raise ChatError("a turn of conversations has texts 'from' and 'value'")
        if speaker == FUNCTION_CALL:
            messages.append({"role": ASSISTANT, "content": "", "tool_calls": _function_calls(value)})
        elif speaker in SHAREGPT_ROLES:
            messages.append({"role": SHAREGPT_ROLES[speaker], "content": value})
        else:
            raise ChatError(f"a turn from {speaker[:40]!r}; known are {', '.join([*SHAREGPT_ROLES, FUNCTION_CALL])}")
    return messages


def _function_calls(value: str) -> list[dict[str, Any]]:
    calls = _load_json(value, "a function_call is no JSON")
    listed = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in listed):
        raise ChatError("a function_call has a name and arguments")
    return [{"type": "function", "function": call} for call in listed]


def _instruction_messages(record: dict[str, Any]) -> list[dict[str, Any]]:
    question, more, answer, system = (record.get(name) for name in ("instruction", "input", "output", "system"))
    if not isinstance(question, str) or not isinstance(answer, str) or not isinstance(more, str | None):
        raise ChatError("instruction, input and output are texts")
    messages = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    for pair in record.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ChatError("history is a list of pairs of question and answer")
        messages += [{"role": "user", "content": pair[0]}, {"role": ASSISTANT, "content": pair[1]}]
    messages.append({"role": "user", "content": f"{question}\n\n{more}" if more else question})
    return [*messages, {"role": ASSISTANT, "content": answer}]


def _completion_document(at: str, record: dict[str, Any], completion: Any) -> Document:
    prompt = record["prompt"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise RecordError("the completion is empty: nothing to learn")
        return Document(at, prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        messages = [*(check_messages(prompt) if prompt else []), *check_messages(completion)]
        return Document(at, chat=_conversation(record, messages, len(prompt)))
    raise RecordError("prompt and completion are both texts, or both lists of messages")
