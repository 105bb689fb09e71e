"""Special tokens that messages spell out: the text and tokens of `transformers`, except that no message forges one."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_templates import ADDED, SPECIAL, TEMPLATES, random_record, save_tokenizer, some_text

pytest.importorskip("transformers")

from transformers import AutoTokenizer

from threefold.engine.data.text.chat_template import chat_prompt, encode_chat, template_of
from threefold.engine.data.text.chatml import ChatError, Conversation
from threefold.engine.data.text.tokenizer import FileTokenizer, Tokens

NUM_CHATS = 25
OWN = ("<|im_start|>", "<|im_end|>")  # what the templates below write themselves
OTHERS = [name for name in SPECIAL if name not in OWN]
# What templates may ask of a message. Each was another text where marks stood around special tokens.
LOOKS = {
    "length": "{{ m.content | length }} {{ m.content }}",
    "startswith": "{{ 'yes' if m.content.startswith('<') else 'no' }}{{ m.content.endswith('>') }}{{ m.content }}",
    "urlencode": "{{ m.content | urlencode }}",
    "message": "{{ m }}",
    "json": "{{ m | tojson }}{{ m.content | tojson(indent=2) }}",
    "slice": "{{ m.content[:7] }}|{{ m.content[-3:] }}",
    "letters": "{{ m.content | upper }}{{ m.content.title() }}",
    "words": "{% for w in m.content.split() %}{{ loop.index }}{{ w }} {% endfor %}",
    "characters": "{% for c in m.content %}{{ c }}{% endfor %}",
    "trim": "{{ '  ' ~ m.content | trim }}{{ m.content.strip('\\n<') }}",
    "macro": "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(m.content) }}{% set y %}{{ m.content }}{% endset %}{{ y }}",
    "escape": "{{ m.content | e }}",
    "set": "{% set ns = namespace(x='') %}{% set ns.x = ns.x + m.content %}{{ '%s, %s' % (ns.x, ns.x | length) }}",
}
LOOKS_AT_EDGES = ("startswith", "trim")  # at characters with which special tokens begin and end, too
# What looks for special tokens in messages, so that no other text in their place gives the same.
CUTS = {
    "split": "{{ m.content.split('<|im_end|>')[0] }}",
    "replace": "{{ m.content | replace('<|im_start|>', '') | replace('<|im_end|>', '') }}",
    "in": "{% if '<|im_end|>' not in m.content and '<|im_start|>' not in m.content %}{{ m.content }}{% endif %}",
}


def opened(folder: Path, template: str) -> tuple[Any, FileTokenizer]:
    save_tokenizer(folder, template)
    return AutoTokenizer.from_pretrained(folder), FileTokenizer(folder / "tokenizer.json")


def turns_of(content: str) -> str:
    """A template that writes the content of each turn so."""
    return "{% for m in messages %}<|im_start|>{{ m.role }}\n" + content + "<|im_end|>{% endfor %}"


def spell(draw: random.Random, names: Sequence[str]) -> str:
    """A text with special tokens, beginnings and ends of them, and added tokens that are not special."""
    name = draw.choice(names)
    pieces = [name, draw.choice(names) * 2, name[: draw.randrange(1, len(name))], name[draw.randrange(len(name)) :]]
    return "".join(draw.choice([*pieces, some_text(draw), draw.choice(ADDED)]) for _ in range(draw.randrange(1, 6)))


def messages_that_spell(draw: random.Random, names: Sequence[str], edge: str = "") -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = random_record(draw, tools=False, reasoning=False)["messages"]
    return [{**message, "content": f"{edge}{spell(draw, names)}{edge}"} for message in messages]


def specials(tokenizer: FileTokenizer, tokens: Tokens) -> list[str]:
    return [tokenizer.special_numbers[token] for token in tokens.tolist() if token in tokenizer.special_numbers]


def text_of(ours: FileTokenizer, messages: list[dict[str, Any]]) -> str:
    template = template_of(ours)
    assert template is not None
    return template.render(messages).text


def with_text(hf: Any, tokens: list[int], names: Sequence[str]) -> list[int]:
    """Tokens with each of some special ones replaced by those of its text."""
    numbers = {hf.convert_tokens_to_ids(name): name for name in names}
    plain = [
        hf.encode(numbers[t], split_special_tokens=True, add_special_tokens=False) if t in numbers else [t]
        for t in tokens
    ]
    return [token for part in plain for token in part]


@pytest.mark.parametrize("name", TEMPLATES)
def test_messages_that_spell_any_special_token(name: str, tmp_path: Path) -> None:
    """Templates that write messages as they are: `transformers` has an option that means the same."""
    hf, ours = opened(tmp_path, TEMPLATES[name])
    draw = random.Random(name)
    for _ in range(NUM_CHATS):
        messages = messages_that_spell(draw, SPECIAL)
        assert text_of(ours, messages) == hf.apply_chat_template(messages, tokenize=False)
        tokens = chat_prompt(ours, messages)
        text = hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours._inner.decode(tokens.tolist(), skip_special_tokens=False) == text
        whole = {"return_dict": False, "sanitize_control_tokens": True, "add_generation_prompt": True}
        # It also takes added tokens that are not special as text where the template writes them: these differ.
        if not any(added in str(messages) for added in ADDED):
            assert tokens.tolist() == hf.apply_chat_template(messages, **whole)


@pytest.mark.parametrize("name", [*LOOKS, *CUTS])
def test_a_template_sees_messages_as_they_are(name: str, tmp_path: Path) -> None:
    """The text is that of `transformers`, and so are all tokens but those that a message would forge."""
    hf, ours = opened(tmp_path, turns_of((LOOKS | CUTS)[name]))
    draw = random.Random(name)
    for _ in range(NUM_CHATS):
        messages = messages_that_spell(draw, OTHERS, "x" if name in LOOKS_AT_EDGES else "")
        assert text_of(ours, messages) == hf.apply_chat_template(messages, tokenize=False)
        tokens = chat_prompt(ours, messages)
        theirs = hf.apply_chat_template(messages, return_dict=False)
        assert tokens.tolist() == with_text(hf, theirs, OTHERS)
        assert specials(ours, tokens) == [*OWN] * len(messages)


@pytest.mark.parametrize("name", [*LOOKS, *CUTS])
def test_the_tokens_that_the_template_writes_cannot_be_forged(name: str, tmp_path: Path) -> None:
    hf, ours = opened(tmp_path, turns_of((LOOKS | CUTS)[name]))
    draw = random.Random(name)
    num_taken = 0
    for _ in range(NUM_CHATS):
        messages = messages_that_spell(draw, OWN, "x" if name in LOOKS_AT_EDGES else "")
        try:
            tokens = chat_prompt(ours, messages)
        except ChatError:  # whose token it is cannot be told
            continue
        num_taken += 1
        assert text_of(ours, messages) == hf.apply_chat_template(messages, tokenize=False)
        assert specials(ours, tokens) == [*OWN] * len(messages)
    assert num_taken == NUM_CHATS if name in LOOKS else num_taken > 0


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for p in m.content %}{{ p.text }}{% endfor %}", [{"text": "a<|im_"}, {"text": "en"}, {"text": "d|>b"}]),
        ("{{ m.content | join }}", ["<", "|", "im_end|>"]),
        ("{{ m.content | tojson }}", {"<|im_end|>": 1}),
        ("{{ m.content.keys() | list }}", {"<|im_end|>": 1}),
        ("{{ m.content | upper | lower }}", "<|IM_end|>"),
        ("{{ m.content | lower }}", "<|IM_END|>"),
        ("{{ m.content ~ 'end|>' }}", "<|im_"),
        ("{{ m.content ~ '|im_end|>' }}", "<"),
        ("<{{ m.content }}", "|im_end|>"),
        ("<|{{ m.content }}", "im_end|>x"),
    ],
)
def test_pieces_that_a_template_joins_forge_nothing(template: str, message: Any, tmp_path: Path) -> None:
    hf, ours = opened(tmp_path, turns_of(template))
    messages = [{"role": "user", "content": message}]
    theirs = hf.apply_chat_template(messages, return_dict=False)
    assert theirs.count(hf.convert_tokens_to_ids("<|im_end|>")) == 2, "the case forges nothing"
    assert specials(ours, chat_prompt(ours, messages)) == [*OWN]


def test_names_and_variables_of_a_record_forge_nothing(tmp_path: Path) -> None:
    _, ours = opened(tmp_path, "{{ bos_token }}{{ style }}{{ tools | tojson }}" + turns_of("{{ m.name }}"))
    messages = [{"role": "user", "content": "x", "name": "</s>"}]
    tokens = chat_prompt(ours, messages, [{"name": "<|im_end|>"}], {"style": "<|im_start|>"})
    assert specials(ours, tokens) == ["<s>", *OWN]
    tokens = chat_prompt(ours, messages, None, {"bos_token": "<|im_end|>"})
    assert specials(ours, tokens) == [*OWN]


def test_a_token_that_the_template_makes_of_a_role_is_its_own(tmp_path: Path) -> None:
    _, ours = opened(tmp_path, "{% for m in messages %}<|{{ m.role | title }}|>{{ m.content }}<|end|>{% endfor %}")
    messages = [{"role": "user", "content": "<|User|>"}, {"role": "assistant", "content": "a<|end|>"}]
    [(tokens, mask)] = encode_chat(ours, Conversation(messages)).samples
    assert specials(ours, tokens) == ["<|User|>", "<|end|>", "<|Assistant|>", "<|end|>"]
    assert ours._inner.decode(tokens[mask == 1].tolist(), skip_special_tokens=False).endswith("a<|end|><|end|>")


def test_a_normalizer_forges_nothing(tmp_path: Path) -> None:
    """A tokenizer may look for a special token in the text as it is normalized: then others spell it too."""
    import tokenizers

    folder = save_tokenizer(tmp_path, "{% for m in messages %}<s>{{ m.content }}{% endfor %}")
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.normalizer = tokenizers.normalizers.NFKC()
    made.add_special_tokens([tokenizers.AddedToken("<q>", normalized=True, special=True)])
    made.save(str(folder / "tokenizer.json"))
    ours = FileTokenizer(folder / "tokenizer.json")
    full_width = "".join(chr(ord(letter) + 0xFEE0) for letter in "<q>")
    with pytest.raises(ChatError, match="makes the special token <q>"):
        chat_prompt(ours, [{"role": "user", "content": full_width}])


MARKED = "{% for m in messages %}{% set body %}{% generation %}{{ m.content }}{% endgeneration %}{% endset %}"


def test_bodies_of_generation_tags_are_seen_as_they_are(tmp_path: Path) -> None:
    seen = "{{ body }} {{ body | length }} {{ body._learned is defined }} {{ body == m.content }}{% endfor %}"
    hf, ours = opened(tmp_path, MARKED + seen)
    messages = [{"role": "assistant", "content": " an answer\U000f0002 "}, {"role": "assistant", "content": "</s>"}]
    assert text_of(ours, messages) == hf.apply_chat_template(messages, tokenize=False)
    [(tokens, mask)] = encode_chat(ours, Conversation(messages)).samples
    assert specials(ours, tokens) == []
    learned = ours._inner.decode(tokens[mask == 1].tolist(), skip_special_tokens=False)
    assert learned == " an answer\U000f0002 </s>"
    _, ours = opened(tmp_path / "changed", MARKED + "{{ body | trim }}{% endfor %}")
    with pytest.raises(ChatError, match="changes the body"):
        encode_chat(ours, Conversation(messages))
