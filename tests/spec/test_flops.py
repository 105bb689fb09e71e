"""Model FLOPs against the check values of data/README.md and against published TFLOP/s over tokens/s."""

import pytest
from repository import ROOT

from threefold.interop.published import is_usable, load_rows, plan_from_row, release
from threefold.spec.flops import average_context, flops_per_token
from threefold.spec.models import MODELS

ROWS = [row for row in load_rows(ROOT / "data" / "published_runs.json") if is_usable(row)]

# GFLOP per token of training, from data/README.md: model, sequence length, MTP depths, TP, release.
CHECK_VALUES = [
    ("deepseek-v3", 4096, 1, 1, None, 259.993),
    ("deepseek-v3", 4096, 1, 2, None, 260.103),
    ("qwen3-30b-a3b", 4096, 0, 1, None, 23.006),
    ("qwen3-235b-a22b", 4096, 0, 1, None, 148.035),
    ("gpt-oss-120b", 4096, 0, 1, "26.06", 32.630),
    ("gpt-oss-120b", 4096, 0, 1, "26.04.01", 27.164),
    ("kimi-k2", 4096, 0, 1, None, 204.477),
    ("nemotron-3-nano", 8192, 0, 1, None, 22.278),
    ("nemotron-3.5-lightning", 8192, 2, 1, None, 28.147),
    ("nemotron-3-super", 8192, 2, 1, None, 84.727),
    ("nemotron-3-ultra", 8192, 2, 1, None, 358.915),
    ("llama3-8b", 8192, 0, 1, None, 51.470),
    ("llama3-70b", 8192, 0, 1, None, 449.223),
    ("llama3.1-405b", 8192, 0, 4, None, 2523.981),
    ("qwen3-next-80b-a3b", 4096, 1, 1, None, 25.129),
]


@pytest.mark.parametrize(("model", "seq_len", "mtp", "tp", "stack_release", "gflops"), CHECK_VALUES)
def test_check_values(model: str, seq_len: int, mtp: int, tp: int, stack_release: str | None, gflops: float) -> None:
    found = flops_per_token(MODELS[model], seq_len, mtp, tp, stack_release) / 1e9
    assert found == pytest.approx(gflops, abs=0.0006)  # the values are printed with three decimals


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_published_throughput_uses_the_same_formula(row: dict[str, float]) -> None:
    plan = plan_from_row(row).plan
    assert plan is not None
    tokens = row["tokens_per_s_per_gpu"]
    if not tokens:
        pytest.skip("the row states no tokens/s")
    # 1.2 % is what data/README.md found; whole samples/s and whole TFLOP/s are the rest of the row.
    samples = tokens * plan.layout.gpus / plan.job.seq_len
    whole_samples = 0.5 / samples if release(row) in ("26.04.01", "26.06.01", "26.08") else 0.0
    allowed = 0.012 + whole_samples
    found = flops_per_token(plan.model, plan.job.seq_len, plan.mtp, plan.layout.tp, plan.stack.release)
    assert found * tokens / 1e12 == pytest.approx(row["tflops_per_gpu"], rel=allowed)


def test_a_window_sees_half_its_square_and_then_its_width() -> None:
    """By hand for 4 tokens and a window of 2: queries see 1, 2, 2, 2 keys; causal attention counts twice the mean."""
    assert average_context(2, 4) == pytest.approx(2 * (1 + 2 + 2 + 2) / 4)
    assert average_context(None, 4096) == 4096
    assert average_context(8192, 4096) == 4096


def test_mtp_and_padding_only_add() -> None:
    model = MODELS["deepseek-v3"]
    plain, mtp = flops_per_token(model, 4096, 0), flops_per_token(model, 4096, 1)
    # A depth is one MoE layer of 61, its joining projection and one more output layer: 4 to 6 % of this model.
    assert 1.02 < mtp / plain < 1.06
    assert flops_per_token(model, 8192, 0) > plain
