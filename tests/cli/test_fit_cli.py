"""`threefold fit`: one line for each number of GPUs, which agrees with what `plan` finds."""

import json
import re

import pytest
from command_line import run

MODEL = "moonlight-16b-a3b"


def rows(out: str) -> dict[int, str]:
    return {int(line.split()[0]): line for line in out.splitlines() if re.match(r" *\d", line)}


def test_it_fits_from_the_number_that_memory_says(capsys: pytest.CaptureFixture[str]) -> None:
    """16B parameters take 6 bytes each for weights and gradients alone: 96 GB are too much for one GPU of 80 GB, and
    half of them are not; the 12 bytes of the optimizer's states do not fit next to them."""
    code, out, _ = run("fit", MODEL, "--gpus", "1,2", capsys=capsys)
    assert code == 0
    lines = rows(out)
    assert " no " in lines[1]
    assert " yes " in lines[2]
    assert "of the optimizer on the host" in lines[2]
    assert "It fits from 2 GPUs on, with full recompute or offload." in out


def test_sizes_double_until_a_plan_is_easy(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("fit", "tiny-qwen3-moe", "--seq-len", "256", capsys=capsys)
    assert code == 0
    assert list(rows(out)) == [1, 2, 4]
    assert "It fits from 1 GPU on without full recompute or offload." in out


def test_sizes_are_those_that_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("fit", MODEL, "--gpus", "1,8", "--seq-len", "8K", "--json", "layout.tp=1", capsys=capsys)
    said = json.loads(out)
    assert code == 0
    assert [point["gpus"] for point in said["points"]] == [1, 8]
    assert [point["fits"] for point in said["points"]] == [False, True]
    assert said["points"][1]["candidate"]["plan"]["job.seq_len"] == 8192


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("fit",), 2),
        (("fit", "nope"), 1),
        (("fit", MODEL, "--gpus", "0"), 2),
        (("fit", MODEL, "--chip", "h1000"), 1),
        (("fit", MODEL, "layout.epp=2"), 1),
        (("fit", "deepseek-v3", "--gpus", "8"), 1),
        (("fit", "mixtral-8x7b", "--target", "megatron-bridge"), 1),
    ],
)
def test_what_cannot_be_is_one_answer(words: tuple[str, ...], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    got, out, err = run(*words, capsys=capsys)
    assert got == code
    assert out + err
    assert "Traceback" not in out + err
