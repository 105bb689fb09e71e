"""What TensorBoard gets: training, evaluation, and the routers of each layer."""

from pathlib import Path

import pytest
from tiny_runs import tiny_plan, tiny_shard

from threefold.engine.train import train

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
pytestmark = pytest.mark.usefixtures("one_thread")


def test_evaluation_and_routers_by_layer_reach_tensorboard(tmp_path: Path) -> None:
    shard = tiny_shard(tmp_path / "counting.tok")
    fields = {"job.data": shard, "job.steps": 4, "run.eval_every": 2, "run.tensorboard": True, "model.num_layers": 2}
    state = train(tiny_plan(fields), tmp_path / "run", lambda text: None)
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    layers = {f"router/{name}/layer_{layer:02d}" for name in ("load_max", "entropy", "dropped") for layer in range(2)}
    assert layers <= tags
    evaluations = [tag for tag in tags if tag.startswith("eval")]
    assert evaluations
    for tag in evaluations:
        assert [event.step for event in events.Scalars(tag)] == [2, 4]
    # The largest load of any layer is the largest of the layers' own.
    loads = [events.Scalars(f"router/load_max/layer_{layer:02d}")[-1].value for layer in range(2)]
    assert max(loads) == pytest.approx(state.last["router/load_max"])
