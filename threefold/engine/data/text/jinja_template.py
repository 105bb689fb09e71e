"""Renders the Jinja chat template of a tokenizer in a sandbox, with what `transformers` offers to templates.

A template is untrusted: it runs in Jinja's immutable sandbox, sees nothing but JSON values, and whatever it raises is a
`ChatError`. `chat_template.py` renders conversations with it.

Two kinds of places in the rendered text must be known, and a template sees neither: the bodies of `{% generation %}`,
which are learned and known to the texts that Jinja joins, and special tokens that a message forges, which stay text.
A special token is forged whose first or last characters are a message's.

A template must see messages as they are, or it would render something else than `transformers` does. So the chat is
rendered as it is, and rendered once more with one character changed in every special token that a message spells, and
in every part of one at the edge of a text, which the text next to it could complete. Both renderings are equally long,
and a special token that differs between them is forged. A template may also look for special tokens in messages, to cut
there for instance. Then the renderings differ elsewhere, and those of the template itself are found the same way: by
changing its own literals.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from threefold.engine.data.text.chatml import ChatError, reasoning_of
from threefold.findings import Finding, FindingsError

if TYPE_CHECKING:
    from jinja2 import nodes

Span = tuple[int, int]


class SpecialTexts:
    """The texts of a tokenizer's special tokens. Upper and lower case are the same, since templates change it."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = {name.lower() for name in names if name}
        self._sizes = sorted({len(name) for name in self._names}, reverse=True)
        self._first, self._last = (_one_of({name[place] for name in self._names}) for place in (0, -1))

    def places(self, text: str) -> Iterator[Span]:
        """Each place where a special token is spelled, the longest where several begin. They may overlap."""
        for match in self._first.finditer(text):
            at = match.start()
            sizes = (size for size in self._sizes if text[at : at + size].lower() in self._names)
            if (size := next(sizes, None)) is not None:
                yield at, at + size

    def change(self, text: str) -> str:
        """The text with one character changed in every special token, and in parts of one at its beginning and end."""
        pieces = [*self.places(text), *self._parts_at_edges(text)]
        if not pieces:
            return text
        changed = list(text)
        for begin, end in pieces:
            at = next((at for at in range(begin, end) if text[at].isascii() and text[at].isalnum()), begin)
            changed[at] = _neighbor(text[at])
        return "".join(changed)

    def _parts_at_edges(self, text: str) -> Iterator[Span]:
        most = max(self._sizes, default=1) - 1
        for match in self._last.finditer(text[:most]):
            head = text[: match.end()].lower()
            if any(name.endswith(head) and name != head for name in self._names):
                yield 0, match.end()
        for match in self._first.finditer(text, max(0, len(text) - most)):
            tail = text[match.start() :].lower()
            if any(name.startswith(tail) and name != tail for name in self._names):
                yield match.start(), len(text)

    def differing(self, text: str, changed: str) -> list[Span] | None:
        """The special tokens of a text that differ in its changed rendering; they may overlap.

        None where the renderings differ in more than characters of the same kind.
        """
        if len(text) != len(changed) or any(a.isalnum() != b.isalnum() for a, b in zip(text, changed, strict=True)):
            return None
        return [place for place in self.places(text) if text[slice(*place)] != changed[slice(*place)]]


def _one_of(characters: set[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(characters))) or "(?!)", re.IGNORECASE)


def _neighbor(character: str) -> str:
    """Another character of the same kind: templates that look at kinds, or escape some, do the same with it."""
    if not character.isascii():
        return chr(ord(character) ^ 1)
    if character.isalnum():
        return chr(ord(character) + (-1 if character in "zZ9" else 1))
    return {"<": ">", ">": "<", "^": "|"}.get(character, "^")


def change_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with all of its texts changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): change_texts(each, change) for key, each in value.items()}
    return [change_texts(each, change) for each in value] if isinstance(value, list) else value


def change_literals(node: "nodes.Node", change: Callable[[str], str]) -> None:
    """Change the texts that a template writes, in its syntax tree; those that it compares or looks for stay."""
    from jinja2 import nodes

    if isinstance(node, nodes.TemplateData):
        node.data = change(node.data)
    elif isinstance(node, nodes.Const) and isinstance(node.value, str):
        node.value = change(node.value)
    is_called = isinstance(node, nodes.Call | nodes.Filter | nodes.Test)
    for child in node.iter_child_nodes(exclude=("args", "kwargs") if is_called else None):
        if not isinstance(child, nodes.Compare):
            change_literals(child, change)


if TYPE_CHECKING:
    from jinja2 import Environment, Template

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
MAX_RENDERED = 2**26  # characters of one conversation
DEEPEST = 64  # objects in each other
_BODIES = "the bodies of generation tags"  # a variable whose name no template can write


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered chat, and places in it."""

    text: str
    learned: tuple[Span, ...] = ()  # bodies of {% generation %}
    forged: tuple[Span, ...] = ()  # special tokens that messages spell out


class _Text(str):
    """A text that knows which of its parts are learned. To a template it is like any other."""

    _learned: tuple[Span, ...]

    @classmethod
    def of(cls, text: str, learned: tuple[Span, ...]) -> "_Text":
        made = cls(text)
        made._learned = learned
        return made

    def __str__(self) -> str:
        return self


class ChatTemplate:
    """One template. `variables` are those of the tokenizer, such as `bos_token`."""

    def __init__(self, source: str, variables: Mapping[str, str], special_names: Sequence[str] = ()) -> None:
        self._source, self._template = source, _compile(source)
        self._variables = dict(variables)
        self.marks_answers = bool(_GENERATION.search(source))
        self._special = SpecialTexts(special_names)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        answers_next: bool = False,
    ) -> Rendered:
        """The text of messages; with `answers_next` also the start of the assistant's next turn."""
        given = {
            **_plain(dict(variables or {})),
            "messages": [_with_reasoning(_plain(dict(message))) for message in messages],
            "tools": _plain(tools),
        }
        fixed = {"strftime_now": datetime.now().strftime, "documents": None, "add_generation_prompt": answers_next}
        text = _run(self._template, fixed | self._variables | given)
        return Rendered(str.__str__(text), getattr(text, "_learned", ()), tuple(self._forged(text, given, fixed)))

    def _forged(self, text: str, given: dict[str, Any], fixed: dict[str, Any]) -> Sequence[Span]:
        """The places of special tokens in a rendered text that come from messages."""
        changed = self._changed(given)
        if changed == given:
            return ()
        spans = self._differing(text, self._template, fixed | self._variables | changed)
        if spans is None and self._are_its_own(text, given, fixed):
            return ()
        if spans is None:
            raise ChatError("a message spells a special token, and the chat template looks at it")
        return spans

    def _are_its_own(self, text: str, given: dict[str, Any], fixed: dict[str, Any]) -> bool:
        """Return whether every special token in a rendered text is written by the template."""
        own = self._differing(text, self._with_other_literals, fixed | self._changed(self._variables) | given)
        return own is not None and len(own) == len(list(self._special.places(text)))

    @cached_property
    def _with_other_literals(self) -> "Template":
        tree = _environment().parse(self._source)
        change_literals(tree, self._special.change)
        return _environment().from_string(tree)

    def _changed(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        return {name: change_texts(value, self._special.change) for name, value in variables.items()}

    def _differing(self, text: str, template: "Template", values: dict[str, Any]) -> list[Span] | None:
        try:
            return self._special.differing(text, _run(template, values))
        except ChatError:
            return None


def _run(template: "Template", values: dict[str, Any]) -> str:
    bodies: list[str] = []
    try:
        text: str = template.render(**values, **{_BODIES: bodies})
    except ChatError:
        raise
    except Exception as error:  # a template may raise anything
        raise ChatError(f"the chat template does not take it: {_first_line(error)}") from error
    if len(getattr(text, "_learned", ())) < len(bodies):
        raise ChatError("the chat template changes the body of {% generation %}: what is learned is not known")
    return text


def _joined(parts: Iterable[str]) -> str:
    """Join the output of a template as Jinja does."""
    listed, learned, size = [], [], 0
    for part in parts:
        learned += [(size + begin, size + end) for begin, end in getattr(part, "_learned", ())]
        listed.append(part)
        size += len(part)
        if size > MAX_RENDERED:
            raise ChatError(f"it renders to more than {MAX_RENDERED} characters")
    text = "".join(listed)
    return _Text.of(text, tuple(learned)) if learned else text


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning goes by several names; templates read `reasoning_content`, those of GPT-OSS `thinking`."""
    reasoning = reasoning_of(message)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any, depth: int = 0) -> Any:
    """A copy of a JSON value: templates get nothing that has methods of its own."""
    if depth > DEEPEST:
        raise ChatError("it is nested too deeply")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, depth + 1) for each in value]
    raise ChatError(f"it holds a {type(value).__name__}, which is no JSON")


@lru_cache(maxsize=8)
def _compile(source: str) -> "Template":
    try:
        environment = _environment()
    except ImportError as error:
        problem, advice = "jinja2, which chat templates need, is not installed", "pip install threefold[train]"
        raise FindingsError(
            [Finding(rule="jinja-installed", at="job.tokenizer", problem=problem, advice=advice)]
        ) from error
    try:
        return environment.from_string(source)
    except Exception as error:  # Jinja takes more than the compiler of Python, which has errors of its own
        problem = f"its chat template cannot be compiled: {_first_line(error)}"
        advice = "correct chat_template.jinja next to the tokenizer, or delete it: ChatML is used then"
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
            call = self.call_method("_learned", [nodes.ContextReference()])
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _learned(self, context: Any, caller: Callable[[], str]) -> str:
            body = caller()
            if not body:
                return body
            context.resolve(_BODIES).append(body)
            return _Text.of(body, ((0, len(body)),))

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

    class ChatEnvironment(ImmutableSandboxedEnvironment):
        concat = staticmethod(_joined)

    made = ChatEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals |= {
        "raise_exception": raise_exception,
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
