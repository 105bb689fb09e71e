"""Text from a run: its own tokenizer, streaming, chats, special tokens, and where an answer ends."""

from pathlib import Path

import pytest
from hf_checkpoints import SPECIALS, save_tokenizer
from tiny_models import spec_of
from tiny_runs import tiny_plan

from threefold.engine.data.text.tokenizer import ByteTokenizer, FileTokenizer, open_tokenizer
from threefold.engine.generate.generate import Sampling, generate
from threefold.engine.generate.sample import TextStream, encode_prompt, run_ends, run_tokenizer, sample_texts
from threefold.engine.models.build import build_model
from threefold.findings import FindingsError

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = "what is 3 and 4? \N{SNOWMAN} — 東京 the answer \N{GRINNING FACE}!"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("run") / "tokenizer"
    found.mkdir()
    save_tokenizer(found)
    return found


def test_streamed_text_is_the_text(folder: Path) -> None:
    """Letters of several tokens come when they are complete, and no piece has half of one."""
    for tokenizer in (open_tokenizer(str(folder)), ByteTokenizer()):
        stream = TextStream(tokenizer)
        pieces = [stream.add(int(token)) for token in tokenizer.encode(TEXT)]
        assert "".join([*pieces, stream.rest()]) == TEXT
        assert not any("\ufffd" in piece for piece in pieces)
        assert sum(map(bool, pieces)) > 10, "it streams"


def test_the_tokenizer_is_the_run_s(folder: Path, tmp_path: Path) -> None:
    run, plan = folder.parent, tiny_plan({})
    tokenizer = run_tokenizer(run, plan)
    assert isinstance(tokenizer, FileTokenizer)
    assert run_ends(run, plan, tokenizer) == {tokenizer.special("<|im_end|>")}
    assert isinstance(run_tokenizer(tmp_path, plan), ByteTokenizer)
    named = run_tokenizer(tmp_path, tiny_plan({"job.tokenizer": str(folder)}))
    assert named.label == tokenizer.label
    assert isinstance(run_tokenizer(run, plan, "bytes"), ByteTokenizer)


def test_prompts_and_chats_have_their_special_tokens(folder: Path) -> None:
    tokenizer = open_tokenizer(str(folder))
    start, end = (tokenizer.special(name) for name in SPECIALS[1:])
    spelled = encode_prompt(tokenizer, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", 400)
    assert spelled.count(start or -1) == 2
    assert encode_prompt(tokenizer, [{"role": "user", "content": "hi"}], 400) == spelled
    assert end in spelled
    with pytest.raises(FindingsError, match="chat-readable"):
        encode_prompt(tokenizer, [{"role": "user"}], 400)
    with pytest.raises(FindingsError, match="prompt-fits-vocab"):
        encode_prompt(tokenizer, "hi", 3)


def test_texts_of_several_prompts_end_where_each_ends() -> None:
    model = build_model(spec_of("qwen3_moe", vocab_size=260), seed=2)
    tokenizer = ByteTokenizer()
    prompts = ["one", "two words"]
    sampling = Sampling(1.0, seed=3)
    rows = list(zip(*generate(model, [list(text.encode()) for text in prompts], 30, sampling), strict=True))
    assert all(len(row) == 30 for row in rows)
    end = rows[0][10]
    assert end is not None
    texts = [
        "".join(pieces) for pieces in zip(*sample_texts(model, tokenizer, prompts, 30, sampling, {end}), strict=True)
    ]
    for row, text in zip(rows, texts, strict=True):
        cut = row.index(end) if end in row else len(row)
        assert text == tokenizer.decode([token for token in row[:cut] if token is not None])
