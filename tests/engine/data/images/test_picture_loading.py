"""Batches with pictures: packing, positions, masks, resuming, balancing, decoding processes, and bad pictures."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pictures import VISION, VOCAB, encoded, noise, patches_of, write_jsonl, write_tar

from threefold.engine.batch import Batch
from threefold.engine.data.images.batch_images import assign_samples
from threefold.engine.data.images.decode import DecodePool, ImageFile, ResizeRequest, decode, image_workers
from threefold.engine.data.images.image_source import ImageSample
from threefold.engine.data.images.patches import patch_rules
from threefold.engine.data.loader import Loader
from threefold.engine.vision import multimodal_positions
from threefold.findings import FindingsError
from threefold.plan.plan import Job

RULES = patch_rules(VISION)
IDS = (VISION.tokens.image, VISION.tokens.video)
SEQ_LEN = 128


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty records: one picture, two, a video, or words alone, with sizes from 4 to 32 tokens."""
    rng, members = np.random.default_rng(0), {}
    for number in range(40):
        kind, key = number % 5, f"{number:03d}"
        sizes = [(int(rng.integers(30, 120)), int(rng.integers(30, 120))) for _ in range({3: 0, 4: 2}.get(kind, 1))]
        for place, (height, width) in enumerate(sizes):
            members[f"{key}.{place}.png"] = encoded(noise(height, width, number))
        fields: dict[str, Any] = {"question": f"Q{number}?", "answer": f"A{number}"}
        if kind == 2:
            members[f"{key}.1.png"] = members[f"{key}.0.png"]
            fields["video"] = {"frames": ["0.png", "1.png"], "timestamps": [0.0, 0.5]}
        members[f"{key}.json"] = fields
    return write_tar(tmp_path_factory.mktemp("shard") / "data.tar", members)


def job_of(data: Path | str | tuple[str, ...], **changes: Any) -> Job:
    facts = {"seq_len": SEQ_LEN, "global_batch": 8, "micro_batch": 2, "task": "sft", "packing": True, **changes}
    return Job(data=str(data) if isinstance(data, Path) else data, **facts)


def loader_of(job: Job, cache: Path, **settings: Any) -> Loader:
    settings = {"prefetch": 0, "vision": VISION, **settings}
    return Loader(job, VOCAB, cache=cache, **settings)


def equal(a: Batch, b: Batch) -> bool:
    def tensors(batch: Batch) -> list[torch.Tensor | None]:
        return [batch.tokens_BS, batch.labels_BS, batch.documents_BS, batch.positions_3BS, *(batch.images or ())]

    pairs = zip(tensors(a), tensors(b), strict=True)
    return a.lengths == b.lengths and all(x is y if x is None or y is None else torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("packing", [False, True])
def test_every_document_comes_once_and_whole(shard: Path, tmp_path: Path, packing: bool) -> None:
    """Packing loses and cuts nothing: the documents of one epoch are those of the index, with their pictures."""
    source = loader_of(job_of(shard, packing=packing), tmp_path).mixture.sources[0]
    index = source.source.index  # type: ignore[attr-defined]
    found = {}
    for number in range(source.num_samples):
        row = source.sample(number)
        assert isinstance(row, ImageSample)
        used = len(row.tokens_S) - row.num_padding
        for place, (start, end) in enumerate(zip(row.starts, (*row.starts[1:], used), strict=True)):
            pictures = [p for p in row.images if p.document == place]
            tokens = tuple(row.tokens_S[start:end].tolist())
            assert tokens not in found
            found[tokens] = [(p.first_token - start, p.grid, tuple(r.file for r in p.requests)) for p in pictures]
            if packing:
                assert row.documents_S is not None
                assert set(row.documents_S[start:end]) == {place}
    expected = {}
    for number in range(index.num_documents):
        first, after = index.shard.offsets[number : number + 2].astype(int)
        tokens = tuple(index.shard.read(first, after).tolist())
        expected[tokens] = [(p.first_token, p.grid, p.files) for p in index.images_of(number)]
    assert found == expected
    assert source.num_samples == 40 if not packing else source.num_samples < 40


@pytest.mark.parametrize("packing", [False, True])
def test_patches_tokens_and_positions_belong_together(shard: Path, tmp_path: Path, packing: bool) -> None:
    loader = loader_of(job_of(shard, packing=packing), tmp_path)
    num_images = 0
    for microbatch in range(loader.num_microbatches):
        batch = loader.batch(0, microbatch)
        rows = [loader.mixture.sample(n) for n in loader.samples(0, microbatch)]
        pictures = [(row, picture) for row in rows if isinstance(row, ImageSample) for picture in row.images]
        assert batch.positions_BS is None
        assert batch.positions_3BS is not None
        assert batch.positions_3BS.shape == (3, 2, SEQ_LEN)
        is_vision_BS = torch.isin(batch.tokens_BS, torch.tensor(IDS))
        if batch.images is None:
            assert not pictures
            assert not is_vision_BS.any()
            continue
        assert torch.equal(batch.images.token_index_V, is_vision_BS.flatten().nonzero()[:, 0])
        assert batch.images.grids_I2.tolist() == [list(picture.grid) for _, picture in pictures]
        expected = [
            patches_of(np.stack([decode(request) for request in picture.requests]), RULES) for _, picture in pictures
        ]
        assert np.array_equal(batch.images.patches_PC.numpy(), np.concatenate(expected))
        num_images += len(pictures)
        for number, row in enumerate(rows):
            assert isinstance(row, ImageSample)
            end = len(row.tokens_S) - row.num_padding
            for place, (start, after) in enumerate(zip(row.starts, (*row.starts[1:], end), strict=True)):
                grids = [p.grid for p in row.images if p.document == place]
                tokens_S = batch.tokens_BS[number, start:after]
                theirs = multimodal_positions(tokens_S, grids, IDS, VISION.merge)
                assert torch.equal(batch.positions_3BS[:, number, start:after], theirs)
    assert num_images > 4


def test_fine_tuning_learns_answers_and_pretraining_all_text(shard: Path, tmp_path: Path) -> None:
    for task, least in (("sft", 1), ("pretrain", 20)):
        row = loader_of(job_of(shard, task=task, packing=False), tmp_path).mixture.sample(0)
        learned = row.labels_S[row.labels_S >= 0]
        assert not np.isin(learned, [*IDS, VISION.tokens.start, VISION.tokens.end]).any()
        assert np.array_equal(row.labels_S[:-1][row.labels_S[:-1] >= 0], row.tokens_S[1:][row.labels_S[:-1] >= 0])
        text = bytes(token for token in learned.tolist() if token < 256).decode()
        assert text.startswith("A") == (task == "sft")
        assert len(learned) > least


def test_a_run_resumes_at_any_step_with_any_ranks(shard: Path, tmp_path: Path) -> None:
    whole = loader_of(job_of(shard), tmp_path)
    batches = [[whole.batch(step, m) for m in range(4)] for step in range(4)]
    first = loader_of(job_of(shard), tmp_path, prefetch=2)
    for microbatch in range(4):
        assert equal(first.batch(0, microbatch), batches[0][microbatch])
    state = first.state()
    first.close()
    for rank in range(2):
        resumed = loader_of(job_of(shard), tmp_path, dp_rank=rank, dp_size=2, prefetch=2)
        resumed.load_state(state)
        for step in (1, 2, 3):
            for microbatch in range(2):
                assert equal(resumed.batch(step, microbatch), batches[step][2 * microbatch + rank])
        resumed.close()


def test_the_data_of_another_run_is_refused(shard: Path, tmp_path: Path) -> None:
    state = loader_of(job_of(shard), tmp_path).state()
    for changes in ({"max_pixels": 4_096}, {"packing": False}, {"seq_len": 96}):
        with pytest.raises(FindingsError, match="data-unchanged"):
            loader_of(job_of(shard, **changes), tmp_path).load_state(state)


def test_ranks_share_a_step_evenly_and_completely(shard: Path, tmp_path: Path) -> None:
    job = job_of(shard, packing=False)
    ranks = [loader_of(job, tmp_path, dp_rank=rank, dp_size=2) for rank in range(2)]
    for step in range(5):
        dealt = [n for loader in ranks for m in range(2) for n in loader.samples(step, m)]
        assert sorted(dealt) == list(range(8 * step, 8 * step + 8))
        loads = [ranks[0].mixture.num_vision_tokens(n) for n in range(8 * step, 8 * step + 8)]
        slots = [[sum(loads[n - 8 * step] for n in loader.samples(step, m)) for m in range(2)] for loader in ranks]
        rows = np.array(loads).reshape(2, 2, 2).sum(axis=2)  # slots of samples in their order
        assert np.ptp(slots) <= np.ptp(rows)
        assert np.ptp(slots) <= max(loads)
    for loader in ranks:
        for microbatch in range(2):
            images = loader.batch(0, microbatch).images
            load = sum(loader.mixture.num_vision_tokens(n) for n in loader.samples(0, microbatch))
            assert load == (0 if images is None else len(images.token_index_V))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 5))
def test_samples_are_dealt_out_level(loads: list[int], per_slot: int) -> None:
    loads = loads * per_slot
    slots = assign_samples(loads, per_slot)
    assert sorted(n for slot in slots for n in slot) == list(range(len(loads)))
    assert {len(slot) for slot in slots} == {per_slot}
    sums = [sum(loads[n] for n in slot) for slot in slots]
    assert max(sums) - min(sums) <= max(loads)
    if per_slot == 1:
        assert sums == sorted(loads, reverse=True)
    if not any(loads):  # as without pictures
        assert [n for slot in slots for n in slot] == list(range(len(loads)))


def test_documents_longer_than_a_sequence_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "large.png").write_bytes(encoded(noise(120, 120)))
    large = {"images": ["large.png"], "text": "64 tokens of a picture"}
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "short"}, large, large])
    loader = loader_of(job_of(path, seq_len=64, task="pretrain"), tmp_path)
    skipped = loader.skipped_images()
    assert (loader.mixture.sources[0].num_samples, skipped.num_records) == (1, 2)
    assert skipped.lines() == [
        "skipped 2 records that cannot be used:",
        f"  {path}: 2 documents longer than job.seq_len (64)",
    ]
    with pytest.raises(FindingsError, match=r"(?s)the shortest has 6.*job.max_pixels"):
        loader_of(job_of(path, seq_len=5), tmp_path)
    assert loader_of(job_of(path, seq_len=64, max_pixels=2_048), tmp_path).skipped_images().num_records == 0


def test_words_alone_and_pictures_mix(shard: Path, tmp_path: Path) -> None:
    text = write_jsonl(tmp_path / "text.jsonl", [{"text": f"only words {n}"} for n in range(30)])
    job = job_of((f"{shard}:0.5", f"{text}:0.5"), task="pretrain")
    loader = loader_of(job, tmp_path)
    kinds = [loader.batch(step, m).images is not None for step in range(4) for m in range(4)]
    assert {True, False} == set(kinds)
    alone = loader_of(job_of(text, task="pretrain"), tmp_path).batch(0)
    assert alone.images is None
    assert alone.positions_3BS is not None
    assert torch.equal(alone.positions_3BS[0], alone.positions_3BS[2])


def test_a_picture_that_cannot_be_decoded_is_gray_and_not_learned(tmp_path: Path) -> None:
    whole = encoded(noise(64, 64), "JPEG")
    members: dict[str, Any] = {}
    for number in range(4):
        members[f"{number}.jpg"] = whole if number % 2 else whole[: len(whole) // 2]
        members[f"{number}.json"] = {"caption": f"{number}"}
    path = write_tar(tmp_path / "data.tar", members)
    loader = loader_of(job_of(path, packing=True, global_batch=1, micro_batch=1, task="pretrain"), tmp_path)
    batches = [loader.batch(step) for step in range(loader.mixture.sources[0].num_samples)]
    assert sum(batch.num_bad_images for batch in batches) == 2
    for batch in batches:
        assert batch.images is not None
        for number, patches in enumerate(batch.images.patches_PC.split(64)):
            labels = batch.labels_BS[0][batch.documents_BS[0] == number]  # type: ignore[index]
            is_bad = chr(batch.tokens_BS[0][batch.documents_BS[0] == number][18]) in "02"  # type: ignore[index]
            assert is_bad == bool((patches == 0).all()) == bool((labels < 0).all())
    lines = loader.skipped_images().lines()
    assert lines[0] == "skipped 2 images that cannot be used:"
    assert all(str(path) in line and "truncated" in line for line in lines[1:])


def test_processes_decode_what_the_thread_decodes(shard: Path, tmp_path: Path) -> None:
    alone, helped = (loader_of(job_of(shard), tmp_path, image_workers=n, prefetch=2 * n) for n in (0, 1))
    with helped:
        assert all(equal(alone.batch(0, m), helped.batch(0, m)) for m in range(4))


class _EndsItsReader(ResizeRequest):
    """A request whose reader dies, as a decoder would that a damaged file crashes."""

    def __reduce__(self) -> Any:
        return os._exit, (1,)


def test_a_process_that_dies_costs_one_picture(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(encoded(noise(32, 32)))
    good, deadly = (kind(ImageFile(str(path)), 16, 16) for kind in (ResizeRequest, _EndsItsReader))
    pool = DecodePool(1)
    try:
        first, second, third = pool.decode([good, deadly, good])
        assert second == "the process that decoded it died"
        assert np.array_equal(first, third)
        assert np.array_equal(first, decode(good))
        assert np.array_equal(pool.decode([good])[0], first)
        with pytest.raises(FindingsError, match="died 3 times in a row"):
            pool.decode([deadly] * 5)
    finally:
        pool.close()


_KILLED_RANK = """
import os, signal, sys
from threefold.engine.data.images.decode import ImageFile, ResizeRequest
from threefold.engine.data.images.decode import DecodePool
if __name__ == "__main__":
    pool = DecodePool(1)
    pool.decode([ResizeRequest(ImageFile(sys.argv[1]), 8, 8)])
    print(*pool._pool._processes, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_end_with_a_rank_that_is_killed(tmp_path: Path) -> None:
    program, picture = tmp_path / "rank.py", tmp_path / "picture.png"
    program.write_text(_KILLED_RANK)
    picture.write_bytes(encoded(noise(32, 32)))
    words = [sys.executable, str(program), str(picture)]
    # Reading the output ends when the last process that holds it has ended: the rank and its worker.
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.strip().isdigit()


def test_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert (image_workers(0), image_workers(7), image_workers(None)) == (0, 7, 4)
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 8}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert image_workers(None) == 1


def test_pictures_need_a_model_that_sees(shard: Path, tmp_path: Path) -> None:
    for data in (str(shard), "scenes", str(shard.parent)):
        with pytest.raises(FindingsError, match="the model has no vision part") as error:
            Loader(job_of(data), VOCAB, cache=tmp_path)
        assert [finding.rule for finding in error.value.findings] == ["data-fits-model"]


def test_a_folder_of_shards_is_read_in_order_and_not_left(shard: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    for name in ("b.tar", "a.tar"):
        picture = encoded(noise(32, 32, ord(name[0])))
        write_tar(
            folder / name, {f"0.{kind}": picture if kind == "png" else {"caption": name} for kind in ("png", "json")}
        )
    source = loader_of(job_of(folder, packing=False, task="pretrain"), tmp_path).mixture.sources[0]
    captions = [bytes(t for t in source.sample(n).tokens_S if 0 < t < 256).decode() for n in range(2)]
    assert captions == ["a.tar", "b.tar"]
    (folder / "c.tar").symlink_to(shard)
    with pytest.raises(FindingsError, match="link out of"):
        loader_of(job_of(folder), tmp_path)


def test_vision_tokens_must_be_in_the_vocabulary(shard: Path, tmp_path: Path) -> None:
    far = replace(VISION, tokens=replace(VISION.tokens, image=VOCAB))
    with pytest.raises(FindingsError, match="data-fits-vocab"):
        loader_of(job_of(shard), tmp_path, vision=far)


def test_a_part_is_held_out(shard: Path, tmp_path: Path) -> None:
    parts = [loader_of(job_of(shard, packing=False), tmp_path, held_out=0.25, evaluation=e) for e in (False, True)]
    seen = [
        {tuple(loader.mixture.sources[0].sample(n).tokens_S) for n in range(loader.mixture.sources[0].num_samples)}
        for loader in parts
    ]
    assert seen[1]
    assert len(seen[0]) + len(seen[1]) == 40
    assert not seen[0] & seen[1]
    assert sum(loader.mixture.num_vision_tokens(n) for loader in parts for n in range(2)) > 0
