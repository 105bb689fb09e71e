"""Sampling about pictures: prompts as in training, caches against the full forward in fp64, and the command."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_vision
import torch
from pictures import VISION, encoded, noise, picture_bomb, write_tar
from tiny_runs import tiny_plan

from threefold.cli.main import main
from threefold.engine.data.images.decode import ImageFile, image_size
from threefold.engine.data.images.encode_record import RecordEncoder
from threefold.engine.data.images.patches import PatchRules, patch_rules
from threefold.engine.data.images.records import ImagePart, Turn
from threefold.engine.data.loader import Loader
from threefold.engine.data.text.tokenizer import ByteTokenizer
from threefold.engine.evaluate import data_loss
from threefold.engine.generate.generate import CachedDecoder
from threefold.engine.generate.image_prompt import ImagePrompt, make_image_prompt
from threefold.engine.models.build import build_model
from threefold.engine.models.decoder import Decoder
from threefold.engine.train import train
from threefold.engine.vision import multimodal_positions
from threefold.findings import FindingsError
from threefold.spec.model import VisionSpec

SAME = 1e-10  # relative, fp64: sums in another order differ by about 1e-14
QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "What is it?"}]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "wide.png", tmp_path / "tall.jpg"]
    found[0].write_bytes(encoded(noise(40, 70)))
    found[1].write_bytes(encoded(noise(64, 32, seed=1), "JPEG"))
    return found


def vision_of(family: str) -> tuple[VisionSpec, PatchRules]:
    vision = tiny_vision.spec_of(family).vision
    assert vision is not None
    return vision, patch_rules(vision, 2_048)


def full_logits(model: Decoder, prompt: ImagePrompt, tokens: list[int]) -> torch.Tensor:
    """Behind the last token, from a forward over all of them; positions are counted anew."""
    vision = model.spec.vision
    assert vision is not None
    assert prompt.images is not None
    grids = [(height, width) for height, width in prompt.images.grids_I2.tolist()]
    ids = (vision.tokens.image, vision.tokens.video)
    positions_3S = multimodal_positions(torch.tensor(tokens), grids, ids, vision.merge)
    with torch.no_grad():
        found = model(torch.tensor([tokens]), images=prompt.images, positions_3BS=positions_3S[:, None]).logits
    assert found is not None
    return found[0, -1]


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_cached_logits_about_pictures_are_those_of_the_full_forward(family: str, files: list[Path]) -> None:
    """A question about two pictures, a text with one, and a prompt without, of different lengths, in one batch."""
    model = build_model(tiny_vision.spec_of(family), dtype=torch.float64)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn(tensor.shape, generator=draw, dtype=torch.float64).to(tensor.dtype) * 0.1)
    vision, rules = vision_of(family)
    limit = min(vars_of_tokens(vision))
    prompts: list[ImagePrompt | None] = [
        make_image_prompt(SmallBytes(limit), vision.tokens, rules, QUESTION, files),
        make_image_prompt(SmallBytes(limit), vision.tokens, rules, "so <image> it is", files[:1]),
        None,
    ]
    texts = [prompt.tokens if prompt else [3, 1, 4, 1, 5] for prompt in prompts]
    cached = CachedDecoder(model)
    found_BV = cached.prefill(texts, prompts)
    for step in range(4):
        for row, prompt in enumerate(prompts):
            if prompt is None:
                with torch.no_grad():
                    logits = model(torch.tensor([texts[row]])).logits
                assert logits is not None
                expected_V = logits[0, -1]
            else:
                expected_V = full_logits(model, prompt, texts[row])
            assert float((found_BV[row] - expected_V).norm() / expected_V.norm()) < SAME, (step, row)
        chosen = [(7 * step + row) % limit for row in range(len(prompts))]
        texts = [[*text, token] for text, token in zip(texts, chosen, strict=True)]
        found_BV = cached.step(chosen)


def vars_of_tokens(vision: VisionSpec) -> list[int]:
    tokens = vision.tokens
    return [tokens.start, tokens.end, tokens.image, tokens.video]


class SmallBytes(ByteTokenizer):
    """Bytes folded into the few ids that a tiny model has below those of its pictures."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def encode(self, text: str) -> np.ndarray:
        return super().encode(text) % self.limit

    def special(self, text: str) -> int | None:
        return None

    end = None


def test_a_prompt_is_the_beginning_of_the_training_document(files: list[Path]) -> None:
    vision, rules = VISION, patch_rules(VISION)
    encoder = RecordEncoder(ByteTokenizer(), vision.tokens, rules, lambda file: image_size(file.read()))
    image = ImagePart(ImageFile(str(files[0])))
    document = encoder.encode([Turn("user", (image, "What is it?")), Turn("assistant", ("A cat.",))])
    prompt = make_image_prompt(ByteTokenizer(), vision.tokens, rules, QUESTION, files[:1])
    whole = np.concatenate(document.tokens).tolist()
    assert whole[: len(prompt.tokens)] == prompt.tokens
    rest = ByteTokenizer().decode([token for token in whole[len(prompt.tokens) :] if token < 256])
    assert rest.startswith("A cat.")
    text = make_image_prompt(ByteTokenizer(), vision.tokens, rules, "A cat", files[:1])
    caption = np.concatenate(encoder.encode([Turn(None, (image, "A cat"))]).tokens).tolist()
    assert text.tokens == [token for token in caption if token != ByteTokenizer().end]


@pytest.mark.parametrize(
    ("content", "prompt", "problem"),
    [
        (b"no picture", "what", "no readable image"),
        (picture_bomb(), "what", "pixels"),
        (None, "what", "cannot be read"),
        (encoded(noise(40, 40), "JPEG")[:-400], "what", "cannot be decoded"),
        (encoded(noise(40, 40)), "<image> and <image>", "more places for images than images"),
    ],
    ids=["text", "bomb", "missing", "cut", "places"],
)
def test_a_picture_that_cannot_be_used_is_a_finding(
    content: bytes | None, prompt: str, problem: str, tmp_path: Path
) -> None:
    vision, rules = vision_of("qwen3_vl_moe")
    file = tmp_path / "picture"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(FindingsError) as caught:
        make_image_prompt(ByteTokenizer(), vision.tokens, rules, prompt, [file])
    [finding] = caught.value.findings
    assert finding.rule == "pictures-readable"
    assert problem in finding.problem


def test_the_command_answers_about_pictures_and_evaluates_them(
    tmp_path: Path, files: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    members: dict[str, Any] = {"0.jpg": files[1].read_bytes(), "0.json": {"question": "What?", "answer": "Noise."}}
    data = str(write_tar(tmp_path / "data.tar", members))
    small = {"model": "tiny-qwen3-vl-moe", "model.num_layers": 2, "job.data": data, "job.packing": True}
    small |= {"job.steps": 1, "job.seq_len": 256, "job.global_batch": 1, "job.micro_batch": 1, "run.image_workers": 0}
    train(tiny_plan(small), tmp_path / "run", lambda text: None)
    asked = ["sample", str(tmp_path / "run"), "--max-tokens", "3", "--chat", "What color?", "--json"]
    answers = []
    for pictures in ([], files[:1], files[1:]):
        assert main([*asked, *(word for file in pictures for word in ("--image", str(file)))]) == 0
        answers.append(capsys.readouterr().out)
    assert all('"text"' in answer for answer in answers)
    assert main([*asked, "--image", str(tmp_path / "none.png")]) == 1
    assert "pictures-readable" in capsys.readouterr().out
    parts = '[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]'
    for words in (["--prompt", "a <image> of"], ["--chat", "hi", "--chat", "What is <image>?"], ["--chat", parts]):
        assert main(["sample", str(tmp_path / "run"), "--max-tokens", "3", *words]) == 1
        said = capsys.readouterr().out
        assert said.startswith(f"error[pictures-readable] --image: prompt {len(words) // 2} has a place for an image")
        assert "add --image FILE" in said
    assert main(["eval", str(tmp_path / "run"), "--data", data, "--json"]) == 0
    assert '"loss"' in capsys.readouterr().out


def test_a_loss_over_data_sees_its_pictures(tmp_path: Path) -> None:
    """The same question about other pixels has another loss, and the loss is that of a training batch."""
    plan = tiny_plan({"model": "tiny-qwen3-vl-moe", "model.num_layers": 2, "job.seq_len": 128, "job.task": "sft"})
    model = build_model(plan.model)
    losses = []
    for seed in range(2):
        members = {"0.png": encoded(noise(32, 32, seed)), "0.json": {"question": "What?", "answer": "Noise."}}
        path = write_tar(tmp_path / f"{seed}.tar", members)
        job = replace(plan.job, data=str(path), packing=True, global_batch=1, micro_batch=1)
        losses.append(data_loss(model, ByteTokenizer(), job, str(path)).loss)
        with Loader(job, plan.model.vocab, cache=tmp_path, vision=plan.model.vision) as loader, torch.no_grad():
            batch = loader.batch(0)
            out = model(
                *(batch.tokens_BS, batch.labels_BS, batch.documents_BS, None, batch.images, batch.positions_3BS)
            )
        assert losses[-1] == pytest.approx(float(out.aux["ce"]), rel=1e-6)
    assert losses[0] != pytest.approx(losses[1], rel=1e-6)


def test_a_text_model_is_not_asked_about_pictures(tmp_path: Path, files: list[Path]) -> None:
    from threefold.engine.generate.sample import sample_texts

    model = build_model(tiny_plan({}).model)
    with pytest.raises(FindingsError) as caught:
        next(sample_texts(model, ByteTokenizer(), ["what"], 3, images=files))
    assert [finding.rule for finding in caught.value.findings] == ["images-need-vision"]
    assert list(sample_texts(model, ByteTokenizer(), ["an <image> tag"], 3))  # to a text model it is text
