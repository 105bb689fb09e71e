"""Records of pictures and text: what is read of tar shards and JSONL, the tokens they become, and what is skipped."""

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st
from pictures import VISION, encoded, noise, picture_bomb, write_jsonl, write_tar
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from threefold.engine.data.images.decode import ImageFile
from threefold.engine.data.images.encode_record import EncodedRecord, RecordEncoder
from threefold.engine.data.images.image_index import ImageIndex, open_image_index
from threefold.engine.data.images.patches import patch_rules
from threefold.engine.data.images.records import ImagePart, RawRecord, RecordError, Turn, VideoPart, parse_turns
from threefold.engine.data.text.tokenizer import ByteTokenizer
from threefold.findings import FindingsError

RULES = patch_rules(VISION)
PNG = encoded(noise(32, 48))  # 2 x 3 tokens
CAPTION = {"caption": "noise"}


def index_of(*paths: Path, cache: Path) -> ImageIndex:
    return open_image_index("data", paths, ByteTokenizer(), VISION.tokens, RULES, cache)


def document(index: ImageIndex, number: int) -> tuple[str, str]:
    """The tokens of a document as text, special ones as signs, and its learned part."""
    signs = {256: "$", 258: "{", 259: "}", 260: "(", 261: ")", 262: "#", 263: "%"}
    first, after = index.shard.offsets[number : number + 2].astype(int)
    tokens, mask = index.shard.read(first, after).tolist(), index.shard.read_mask(first, after)
    text = "".join(signs.get(token) or chr(token) for token in tokens)
    return text, "".join(letter for letter, learned in zip(text, mask, strict=True) if learned)


def turns_of(fields: dict[str, Any], names: tuple[str, ...] = ()) -> list[Turn]:
    return parse_turns(RawRecord("here", fields, ImageFile, names))


def test_a_tar_shard_has_records_of_all_kinds(tmp_path: Path) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "Which?"}]
    chat = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "This."}]}
    members = {
        "a/0.png": PNG,
        "a/0.json": {"caption": "noise", "width": 48},
        "a/1.png": PNG,
        "a/1.txt": "more",
        "a/2.0.png": PNG,
        "a/2.1.jpg": encoded(noise(40, 16), "JPEG"),
        "a/2.json": {"images": ["1.jpg", "0.png"], "question": "<image>or <image>?", "answer": "First"},
        "a/3.json": chat,
        "a/3.png": PNG,
        "a/4.json": {"text": "words alone"},
    }
    index = index_of(write_tar(tmp_path / "some.tar", members), cache=tmp_path)
    assert (index.num_documents, index.num_records, index.num_skipped) == (5, 5, 0)
    assert document(index, 0) == ("(######)noise$", "noise$")
    assert document(index, 1) == ("(######)more$", "more$")
    # 40 x 16 pixels are 2 x 1 tokens by rounding to even, and below the least of pixels: 4 x 2 tokens.
    asked = "{user\n(########)or (######)?}\n{assistant\nFirst}\n"
    assert document(index, 2) == (asked, "First}")
    assert document(index, 3) == ("{user\n(######)Which?}\n{assistant\nThis.}\n", "This.}")
    assert document(index, 4) == ("words alone$", "words alone$")
    placed = [[(p.first_token, p.grid) for p in index.images_of(number)] for number in range(5)]
    assert placed == [[(1, (4, 6))], [(1, (4, 6))], [(7, (8, 4)), (20, (4, 6))], [(7, (4, 6))], []]
    assert index.vision_tokens_of().tolist() == [6, 6, 14, 6, 0]
    assert index.images_of(1)[0].files[0].read() == PNG


def test_a_shard_is_indexed_once_and_a_damaged_index_anew(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "some.tar", {"0.png": PNG, "0.json": CAPTION})
    first = index_of(path, cache=tmp_path)
    [arrays] = tmp_path.glob("images-*.safetensors")
    before = arrays.stat().st_mtime_ns
    assert index_of(path, cache=tmp_path).digest == first.digest
    assert arrays.stat().st_mtime_ns == before
    arrays.write_bytes(arrays.read_bytes()[:-40])
    assert index_of(path, cache=tmp_path).digest == first.digest
    assert arrays.stat().st_mtime_ns != before
    moved = tmp_path / "elsewhere.tar"
    path.rename(moved)
    assert index_of(moved, cache=tmp_path).digest == first.digest
    other = write_tar(tmp_path / "other.tar", {"0.png": encoded(noise(32, 48, 1)), "0.json": CAPTION})
    assert index_of(other, cache=tmp_path).digest != first.digest


def test_jsonl_names_pictures_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(PNG)
    (tmp_path.parent / "outside.png").write_bytes(PNG)
    (tmp_path / "link.png").symlink_to(tmp_path.parent / "outside.png")
    (tmp_path / "bomb.png").write_bytes(picture_bomb())
    (tmp_path / "cut.png").write_bytes(PNG[:20])
    good = {"images": ["pictures/a.png"], **CAPTION}
    absolute = {"images": [str(tmp_path / "pictures" / "a.png")], **CAPTION}
    bad = {
        "../outside.png": "outside the folder",
        "/etc/hostname": "outside the folder",
        "link.png": "outside the folder",
        "absent.png": "No such file",
        "pictures": "a folder",
        "bomb.png": "pixels",
        "cut.png": "no readable image",
        "https://example.com/a.png": "not the name of a file",
        "data:image/png;base64,AAAA": "not the name of a file",
        "a\0.png": "not the name of a file",
    }
    records = [good, *({"images": [name], **CAPTION} for name in bad), "no json", "[1]", absolute]
    index = index_of(write_jsonl(tmp_path / "some.jsonl", records), cache=tmp_path)
    assert (index.num_documents, index.num_records, index.num_skipped) == (2, 14, 12)
    assert [at.rpartition(":")[2] for at, _ in index.skipped] == [str(line) for line in range(2, 14)]
    for (_, reason), expected in zip(index.skipped, [*bad.values(), "not valid JSON", "no JSON object"], strict=True):
        assert expected in reason


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "no messages"),
        ({"caption": 3}, "no messages"),
        ({"question": "What?"}, "no messages"),
        ({"messages": []}, "no list of turns"),
        ({"messages": [{"role": "poet", "content": "x"}]}, "a role of"),
        ({"messages": [{"role": "user", "content": "x"}]}, "nothing to learn"),
        ({"messages": [{"role": "assistant", "content": 3}]}, "text or a list of parts"),
        ({"messages": [{"role": "assistant", "content": [{"type": "sound"}]}]}, "an image or a video"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, "more places for images"),
        ({"images": ["a"], "caption": "<image><image>"}, "more places for images"),
        ({"images": ["a", "b"], "messages": [{"role": "assistant", "content": "<image>"}]}, "more than places"),
        ({"images": [3], "caption": "x"}, "named by text"),
        ({"video": 3, "caption": "x"}, "a list of frames"),
        ({"video": {"frames": []}, "caption": "x"}, "from 1 to 768"),
        ({"video": {"frames": ["a", "b"]}, "caption": "x"}, "one timestamp"),
        ({"video": {"frames": ["a", "b"], "timestamps": [0]}, "caption": "x"}, "one timestamp"),
        ({"video": {"frames": ["a", "b"], "timestamps": [1, 0]}, "caption": "x"}, "do not rise"),
        ({"video": {"frames": ["a", "b"], "timestamps": [0, float("nan")]}, "caption": "x"}, "one timestamp"),
        ({"video": {"frames": ["a", "b"], "fps": 0}, "caption": "x"}, "one timestamp"),
    ],
)
def test_what_a_record_cannot_be(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        turns_of(fields)


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats()
    | st.sampled_from(["", "a", "<image>", "user", "image"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "messages",
                    "role",
                    "content",
                    "type",
                    "image",
                    "images",
                    "video",
                    "frames",
                    "timestamps",
                    "fps",
                    "text",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["messages", "images", "video", "text", "question", "answer"]), _JSON))
def test_any_json_is_a_record_or_refused(fields: dict[str, Any]) -> None:
    with contextlib.suppress(RecordError):
        assert all(isinstance(turn, Turn) for turn in turns_of(fields, ("a", "b")))


def test_pictures_beside_the_text_come_first() -> None:
    a, b = ImagePart(ImageFile("a")), ImagePart(ImageFile("b"))
    both = {"images": ["a", "b"]}
    assert turns_of({**both, "text": "words"}) == [Turn(None, (a, b, "words"))]
    assert turns_of({**both, "text": "<image>and <image>"}) == [Turn(None, (a, "and ", b))]
    assert turns_of({"image": "a", "question": "Q", "answer": "A"}) == [
        Turn("user", (a, "Q")),
        Turn("assistant", ("A",)),
    ]
    assert turns_of({"caption": "<image>"}) == [Turn(None, ("<image>",))]  # no pictures: it is text
    system = {"role": "system", "content": "S"}
    chat = [system, {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    expected = [Turn("system", ("S",)), Turn("user", (a, b, "Q")), Turn("assistant", ("A",))]
    assert turns_of({**both, "messages": chat}) == expected


def encode(turns: list[Turn], size: tuple[int, int] = (32, 48)) -> EncodedRecord:
    return RecordEncoder(ByteTokenizer(), VISION.tokens, RULES, lambda file: size).encode(turns)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_video_is_a_picture_for_each_pair_of_frames(count: int) -> None:
    """Timestamps are those of transformers' processor, whose frames are numbered and have a rate."""
    fps = 3.0
    video = VideoPart(tuple(ImageFile(str(n)) for n in range(count)), tuple(n / fps for n in range(count)))
    found = encode([Turn(None, (video, "end"))], (16, 32))
    times = Qwen3VLProcessor._calculate_timestamps(None, list(range(count)), fps, 2)
    assert [[int(file.path) for file in picture.files] for picture in found.images] == [
        [first, min(first + 1, count - 1)] for first in range(0, count, 2)
    ]
    grid = found.images[0].grid
    pads = [VISION.tokens.video] * (grid[0] * grid[1] // 4)
    expected: list[int] = []
    for seconds, picture in zip(times, found.images, strict=True):
        expected += [*f"<{seconds:.1f} seconds>".encode(), VISION.tokens.start]
        assert picture.first_token == len(expected)
        expected += [*pads, VISION.tokens.end]
    assert np.concatenate(found.tokens).tolist() == [*expected, *b"end", 256]


def test_frames_of_different_sizes_and_single_frames_are_skipped(tmp_path: Path) -> None:
    for name, height in (("a.png", 32), ("b.png", 48)):
        (tmp_path / name).write_bytes(encoded(noise(height, 32)))
    videos = [["a.png", "a.png"], ["a.png", "b.png"], ["a.png"]]
    records = [{"video": {"frames": names, "fps": 2}, **CAPTION} for names in videos]
    index = index_of(write_jsonl(tmp_path / "some.jsonl", records), cache=tmp_path)
    assert index.num_documents == 1
    assert [reason for _, reason in index.skipped] == [
        "the frames of a video have different sizes",
        "a video has at least 2 frames, not 1",
    ]


def test_the_prompt_of_an_answer_begins_like_the_document_that_has_it() -> None:
    image = ImagePart(ImageFile("a"))
    encoder = RecordEncoder(ByteTokenizer(), VISION.tokens, RULES, lambda file: (32, 48))
    prompt = np.concatenate(encoder.prompt([Turn("user", (image, "Q"))]).tokens)
    whole = np.concatenate(encoder.encode([Turn("user", (image, "Q")), Turn("assistant", ("A",))]).tokens)
    assert np.array_equal(whole[: len(prompt)], prompt)
    assert bytes(whole[len(prompt) :].tolist()[:1]) == b"A"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (bytes(1024), "none of 0 records"),
        (b"", "empty file"),
        (b"not a tar" * 100, "no readable tar shard"),
        (b"\x1f\x8b\x08" + bytes(600), "no readable tar shard"),
    ],
)
def test_a_file_that_is_no_shard_is_one_finding(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "some.tar"
    path.write_bytes(content)
    with pytest.raises(FindingsError, match=reason) as error:
        index_of(path, cache=tmp_path)
    assert [finding.rule for finding in error.value.findings] == ["pictures-readable"]


def test_a_shard_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = write_tar(
        tmp_path / "some.tar",
        {f"{n}.{kind}": PNG if kind == "png" else json.dumps(CAPTION) for n in range(9) for kind in ("png", "json")},
    )
    whole = path.read_bytes()
    for size in (20_000, 20_480, 512 * 13, 512 * 13 + 7):
        path.write_bytes(whole[:size])
        with pytest.raises(FindingsError, match="no readable tar shard"):
            index_of(path, cache=tmp_path)
