"""Files next to a Hugging Face `tokenizer.json`: the names of special tokens and the chat templates.

`FileTokenizer` reads them with `read_tokenizer_settings`. A configuration that is missing or damaged is as one that
says nothing: only the tokenizer itself is needed for text. A template that cannot be read is refused, because chats
would be written otherwise in silence. `copy_tokenizer` keeps the files of a run in the run's folder.
"""

import base64
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from threefold.findings import Finding, FindingsError
from threefold.safe_files import parse_json, read_bounded, read_json_object, write_aside

TOKENIZER, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
SPECIAL_TOKENS = "special_tokens_map.json"
TEMPLATES = "additional_chat_templates"  # a folder of further templates, NAME.jinja
DEFAULT, TOOL_USE = "default", "tool_use"
ROLES_OF_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_TEMPLATE_BYTES = 2**20  # published ones have some 20 KiB
MAX_TOKENIZER_BYTES = 2**26  # published ones have some 30 MiB
MAX_ENTRIES = 1_500_000  # of a tokenizer; the library takes up to 500 bytes for each. Gemma's has 1.3 million
MAX_TEMPLATES = 32
MAX_PATTERN = 10_000  # characters of a regular expression; those of published tokenizers have some 300
MAX_GROWTH = (
    10_000  # characters that a tokenizer's steps may put in the place of one; those that are published: some 10
)
_BYTES_OF_UNIT = 4  # of the trie in a precompiled table of characters, whose size in bytes comes first
COPIED = (TOKENIZER, CONFIG, TEMPLATE, SPECIAL_TOKENS, "vocab.json", "merges.txt", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """The special tokens by their role (`eos_token`), and the chat templates by name."""

    special_tokens: dict[str, str] = field(default_factory=dict)
    templates: dict[str, str] = field(default_factory=dict)

    @property
    def template_digest(self) -> str | None:
        """Identifies the templates and the tokens that they print; None where there is no template."""
        if not self.templates:
            return None
        facts = repr((sorted(self.templates.items()), sorted(self.special_tokens.items())))
        return hashlib.sha256(facts.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def read_tokenizer_settings(folder: Path) -> TokenizerSettings:
    config, marks = _read_object(folder / CONFIG), _read_object(folder / SPECIAL_TOKENS)
    named = config.get("extra_special_tokens")
    tokens = {**marks, **(named if isinstance(named, dict) else {}), **config}
    roles = [*ROLES_OF_TOKENS, *(named if isinstance(named, dict) else {})]
    special = {role: text for role in roles if (text := _token_text(tokens.get(role))) is not None}
    return TokenizerSettings(special, _read_templates(folder, config))


def check_bounded(raw: bytes) -> None:
    """Raise ValueError for a `tokenizer.json` of too many values, or with steps that make texts too long.

    The library that reads it has no limits: a text that grows past the memory would end the process.
    """
    if raw.count(b",") > MAX_ENTRIES:
        raise ValueError(f"it has more than {MAX_ENTRIES} entries")
    whole = parse_json(raw)
    if not isinstance(whole, dict):
        raise ValueError("it holds no JSON object")
    steps = [whole.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]
    growth = math.prod(max(1, len(text)) for step in steps for text in _texts(step, ("content", "prepend")))
    if growth > MAX_GROWTH:
        raise ValueError(f"its steps can replace one character by {min(growth, 10**12)}")
    if any(len(text) > MAX_PATTERN for step in steps for text in _texts(step, ("Regex", "String", "pattern"))):
        raise ValueError(f"it has a pattern of more than {MAX_PATTERN} characters")
    for text in _texts(whole.get("normalizer"), ("precompiled_charsmap",)):
        # The library would panic at the first character, and print where.
        if int.from_bytes(base64.b64decode(text[:8])[:4], "little") < _BYTES_OF_UNIT:
            raise ValueError("its table of precompiled characters is empty")


def _texts(value: Any, names: tuple[str, ...]) -> Iterator[str]:
    """The texts of these fields, at any depth."""
    for name, each in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        if isinstance(each, str):
            if name in names:
                yield each
        else:
            yield from _texts(each, names)


def copy_tokenizer(source: Path, out: Path) -> list[str]:
    """Copy the files of a tokenizer into a folder, and return their names. Files of others in the folder stay."""
    folder = source if source.is_dir() else source.parent
    paths = [(folder / name, name) for name in COPIED]
    if source.is_file():
        paths[0] = (source, TOKENIZER)
    more = sorted((folder / TEMPLATES).glob("*.jinja"))[:MAX_TEMPLATES]
    copied = []
    for path, name in [*paths, *((each, f"{TEMPLATES}/{each.name}") for each in more)]:
        try:
            content = read_bounded(path, MAX_TOKENIZER_BYTES)
        except OSError:  # `FileTokenizer` has refused a tokenizer.json that cannot be read
            continue
        try:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            write_aside(out / name, content)
        except OSError as error:
            problem, advice = f"cannot be written: {error.strerror or error}", "give a folder that can be written"
            finding = Finding(rule="file-writable", at=str(out / name), problem=problem, advice=advice)
            raise FindingsError([finding]) from error
        copied.append(name)
    return copied


def _read_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Files come before the configuration, as in `transformers`."""
    files = {TEMPLATE: DEFAULT} | {f"{TEMPLATES}/{path.name}": path.stem for path in _template_files(folder)}
    templates = {name: text for file, name in files.items() if (text := _read_text(folder / file)) is not None}
    if templates:
        return templates
    given = config.get("chat_template")
    if isinstance(given, str):
        return {DEFAULT: given}
    listed = [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []
    pairs = [(each.get("name"), each.get("template")) for each in listed[:MAX_TEMPLATES]]
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}


def _template_files(folder: Path) -> list[Path]:
    try:
        return sorted((folder / TEMPLATES).glob("*.jinja"))[:MAX_TEMPLATES]
    except OSError:
        return []


def _read_text(path: Path) -> str | None:
    """The text of a template; None where there is none."""
    try:
        return read_bounded(path, MAX_TEMPLATE_BYTES).decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        problem = f"the chat template cannot be read: {getattr(error, 'strerror', None) or error}"
        advice = "correct it, or delete it: conversations are then written in ChatML"
        raise FindingsError(
            [Finding(rule="tokenizer-readable", at=str(path), problem=problem, advice=advice)]
        ) from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except (OSError, ValueError):
        return {}


def _token_text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
