"""Renders the Jinja chat template of a tokenizer in a sandbox, with what `transformers` offers to templates.

A template comes from a stranger: it runs in Jinja's immutable sandbox, sees nothing but JSON values, and whatever it
raises is a `ChatError`. `chat_template.py` renders conversations with it.

What must be known of places in the rendered text is marked by characters that Unicode reserves for private use: the
bodies of `{% generation %}`, which are learned, and special tokens that a message spells out, which stay text so that
data cannot forge them. `ChatTemplate.render` takes the marks out again.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from threefold.engine.data.text.chat.conversation import ChatError, reasoning_of
from threefold.findings import Finding, FindingsError

if TYPE_CHECKING:
    from jinja2 import Environment, Template

SPELLED, SPELLED_END, LEARNED, LEARNED_END = "\U000f0000", "\U000f0001", "\U000f0002", "\U000f0003"
_MARKS = re.compile(f"[{SPELLED}-{LEARNED_END}]")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
MAX_RENDERED = 2**26  # characters of one conversation
DEEPEST = 64  # objects in each other
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered chat, and places in it."""

    text: str
    learned: tuple[Span, ...] = ()  # bodies of {% generation %}
    spelled: tuple[Span, ...] = ()  # special tokens that messages spell out


class ChatTemplate:
    """One template. `variables` are those of the tokenizer, such as `bos_token`."""

    def __init__(self, source: str, variables: Mapping[str, str], special_names: Sequence[str] = ()) -> None:
        self._template = _compile(source)
        self._variables = dict(variables)
        self.marks_answers = bool(_GENERATION.search(source))
        longest_first = sorted(filter(None, special_names), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        answers_next: bool = False,
    ) -> Rendered:
        """The text of messages; with `answers_next` also the start of the assistant's next turn."""
        try:
            text = self._template.render(
                **{
                    **self._variables,
                    "documents": None,
                    **_plain(dict(variables or {}), self._mark),
                    "messages": [_with_reasoning(_plain(dict(message), self._mark)) for message in messages],
                    "tools": _plain(tools, self._mark),
                    "add_generation_prompt": answers_next,
                }
            )
        except ChatError:
            raise
        except Exception as error:  # a template may raise anything
            raise ChatError(f"the chat template does not take it: {_first_line(error)}") from error
        if len(text) > MAX_RENDERED:
            raise ChatError(f"it renders to more than {MAX_RENDERED} characters")
        return _take_out_marks(text)

    def _mark(self, text: str) -> str:
        if _MARKS.search(text):
            raise ChatError("it has private-use characters (U+F0000 to U+F0003)")
        return self._special.sub(lambda found: f"{SPELLED}{found[0]}{SPELLED_END}", text)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning goes by several names; templates read `reasoning_content`, those of GPT-OSS `thinking`."""
    reasoning = reasoning_of(message)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any, mark: Callable[[str], str], depth: int = 0) -> Any:
    """A copy of a JSON value with special tokens marked: templates get nothing that has methods of its own."""
    if depth > DEEPEST:
        raise ChatError("it is nested too deeply")
    if isinstance(value, str):
        return mark(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each, mark, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, mark, depth + 1) for each in value]
    raise ChatError(f"it holds a {type(value).__name__}, which is no JSON")


def _take_out_marks(text: str) -> Rendered:
    if not _MARKS.search(text):
        return Rendered(text)
    parts: list[str] = []
    size, at = 0, 0
    open_at: dict[str, int] = {}
    spans: dict[str, list[Span]] = {SPELLED: [], LEARNED: []}
    for found in _MARKS.finditer(text):
        parts.append(text[at : found.start()])
        size, at = size + found.start() - at, found.end()
        kind = SPELLED if found[0] in (SPELLED, SPELLED_END) else LEARNED
        if found[0] == kind and kind not in open_at:
            open_at[kind] = size
        elif found[0] != kind and kind in open_at:
            spans[kind].append((open_at.pop(kind), size))
        else:
            raise ChatError("the chat template cuts a text in the middle of a special token")
    if open_at:
        raise ChatError("the chat template cuts a text in the middle of a special token")
    learned = tuple(span for span in spans[LEARNED] if span[0] < span[1])
    return Rendered("".join([*parts, text[at:]]), learned, tuple(spans[SPELLED]))


@lru_cache(maxsize=8)
def _compile(source: str) -> "Template":
    try:
        import jinja2
    except ImportError as error:
        problem, advice = "jinja2, which chat templates need, is not installed", "pip install threefold[train]"
        raise FindingsError(
            [Finding(rule="jinja-installed", at="job.tokenizer", problem=problem, advice=advice)]
        ) from error
    try:
        return _environment().from_string(source)
    except (jinja2.TemplateError, RecursionError, ValueError, OverflowError) as error:
        problem = f"its chat template cannot be compiled: {_first_line(error)}"
        advice = "correct chat_template.jinja beside the tokenizer, or delete it: ChatML is used then"
        raise FindingsError(
            [Finding(rule="chat-template-compiles", at="job.tokenizer", problem=problem, advice=advice)]
        ) from error


def _environment() -> "Environment":
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class GenerationTag(Extension):
        """`{% generation %}...{% endgeneration %}`: the body is what the assistant says."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own form

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            return f"{LEARNED}{caller()}{LEARNED_END}"

    class PlainNamespace(Namespace):
        """A namespace without attributes that begin with an underscore, which could lead out of the sandbox."""

        def __init__(*args: Any, **attributes: Any) -> None:
            self, given = args[0], dict(*args[1:], **attributes)
            for name in given:
                PlainNamespace._check(name)
            Namespace.__init__(self, given)

        def __setitem__(self, name: str, value: Any) -> None:
            PlainNamespace._check(name)
            Namespace.__setitem__(self, name, value)

        @staticmethod
        def _check(name: Any) -> None:
            if str(name).startswith("_"):
                raise SecurityError(f"a namespace has no attribute {name!r}")

    class PlainDict:
        """`dict` without the type's other attributes."""

        def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
            return dict(*args, **values)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": PlainDict(),
        "namespace": PlainNamespace,
    }
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is. Jinja's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
