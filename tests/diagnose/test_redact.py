"""What a diagnosis shows holds no path, host, token or prompt of whoever ran the job, unless it is asked for raw."""

import json
import random
from pathlib import Path

import pytest
from command_line import run as command
from job_logs import DEATHS, write_log

from threefold.diagnose.redact import Redactor

# A line, and the words in it that nobody else may see.
SECRETS = [
    ("RuntimeError: cannot read /home/anna/secret-project/data.bin", ("anna", "secret-project")),
    ("FileNotFoundError: [Errno 2] No such file or directory: '/mnt/acme/ckpt/iter_10/common.pt'", ("acme",)),
    ('  File "/lustre/fsw/acme/train.py", line 3, in main', ("acme", "lustre")),
    ("OSError: ~/private/run/x.log is gone", ("private",)),
    (r"OSError: C:/Users/anna/run/x.log is gone", ("anna",)),
    ("could not open file:///home/anna/x.bin", ("anna",)),
    ("srun: error: gpu-b17-4: task 3: Exited with exit code 1", ("gpu-b17-4",)),
    ("slurmstepd: error: *** STEP 123.0 ON dgx07 CANCELLED AT 2026-03-03T10:00:00 DUE TO TIME LIMIT ***", ("dgx07",)),
    ("  host      : vm-train.internal.acme.com", ("vm-train", "acme")),
    ("node17:160539:160539 [0] NCCL WARN NET/IB : Got async event : port error", ("node17",)),
    ("Connection to 10.28.38.82 refused, tried fe80::1ff:fe23:4567:890a too", ("10.28.38.82", "fe80::1ff")),
    ("MASTER_ADDR=head0.cluster.local MASTER_PORT=29500", ("head0",)),
    ("HF_TOKEN=hf_abcdefghijklmnopqrstuvwx is not valid", ("hf_abcdefghij",)),
    ("wandb: api_key: 0123456789abcdef0123456789abcdef01234567", ("0123456789abcdef",)),
    ("Authorization: Bearer abcdef.ghijkl-mnop", ("abcdef.ghijkl",)),
    ("401 Client Error for url https://anna:hunter22@hub.acme.com/model", ("anna", "hunter22")),
    ("AWS_SECRET_ACCESS_KEY='wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY'", ("wJalrXUtn",)),
    ("mail the owner, anna.b@acme.com", ("anna.b",)),
    ("ValueError: bad record {'prompt': 'My name is Anna and I live in Berlin'}", ("Anna", "Berlin")),
    ('KeyError: {"text": "the patient was told that", "id": 3}', ("patient",)),
    ("messages=[{'role': 'user', 'content': 'what is wrong with my knee?'}]", ("knee",)),
]


@pytest.mark.parametrize(("line", "words"), SECRETS, ids=[line[:24] for line, _ in SECRETS])
def test_each_is_taken_out_and_raw_leaves_it(line: str, words: tuple[str, ...]) -> None:
    shown = Redactor()(line)
    assert [word for word in words if word in shown] == []
    assert Redactor(raw=True)(line) == line


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "AssertionError: num_experts (128) must be divisible by expert_model_parallel_size (48)",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.11 GiB",
        "NCCL version 2.27.5+cuda12.9",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "max_tokens=4096 num_tokens: 16384, moe_token_dispatcher_type: alltoall",
        "E1105 06:28:31.000000 881 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1)",
    ],
)
def test_what_says_something_about_the_death_stays(line: str) -> None:
    assert Redactor()(line) == line


def test_a_place_in_a_package_stays() -> None:
    shown = Redactor()('File "/opt/venv/lib/python3.12/site-packages/megatron/core/parallel_state.py", line 9')
    assert "megatron/core/parallel_state.py" in shown
    assert "/opt/venv" not in shown


def test_two_hosts_stay_two() -> None:
    redact = Redactor()
    lines = [f"srun: error: {host}: task 0: Exited with exit code 1" for host in ("node1", "node2", "node1")]
    first, second, again = map(redact, lines)
    assert first == again != second


def test_nothing_leaks_into_the_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every line as the error that killed a job, as text and as JSON."""
    for number, (line, words) in enumerate(SECRETS):
        log = tmp_path / "a.log"
        write_log(log, random.Random(number), "torchtitan", DEATHS[number], "torchrun")
        with log.open("a") as file:
            file.write(f"Traceback (most recent call last):\n  File 'x.py', line 1\nRuntimeError: {line}\n{line}\n")
        for flags in ([], ["--json"]):
            _, out, _ = command("diagnose", str(log), *flags, capsys=capsys)
            assert [word for word in words if word in out] == [], line
            if flags:
                json.loads(out)
