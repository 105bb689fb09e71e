"""A configuration for a longer context than a checkpoint was made for: how far its positions reach, and how they turn.

`threefold finetune` and `threefold train` ask with `check_positions` and write what `with_positions` returns into the
folder of the run; `export-hf` writes it out again.
"""

from collections.abc import Mapping
from typing import Any

from threefold.findings import Finding, FindingsError, shown

KINDS = ("none", "linear", "yarn")
_POSITIONS = "max_position_embeddings"


def num_positions(config: Mapping[str, Any]) -> int | None:
    """The positions of a checkpoint; None where its configuration does not say."""
    found = _text_table(config).get(_POSITIONS)
    return found if type(found) is int and found > 0 else None


def check_positions(positions: int | None, seq_len: int) -> None:
    """Raise where sequences are longer than a checkpoint's positions reach: what then holds is not for us to guess."""
    if positions is None or seq_len <= positions:
        return
    factor = seq_len / positions
    problem = f"{seq_len:,} tokens, and the checkpoint was made for {positions:,} positions"
    advice = (
        f"say how rotary positions reach {seq_len:,}: --rope-scaling yarn or linear stretches them {factor:g} times, "
        f"none leaves them as they are; {_POSITIONS} of the run and of its export is then {seq_len}"
    )
    found = Finding(
        rule="context-fits-checkpoint",
        at="job.seq_len",
        problem=problem,
        fix={"job.seq_len": positions},
        kind="suggestion",
        advice=advice,
    )
    raise FindingsError([found])


def with_positions(config: Mapping[str, Any], seq_len: int, kind: str) -> dict[str, Any]:
    """The configuration for sequences of a length, with rotary positions of a kind; unchanged where they reach it.

    A scaling of the same kind that the checkpoint has goes on from the length that it began with.
    """
    table = _text_table(config)
    positions = num_positions(config)
    if positions is None or seq_len <= positions:
        return dict(config)
    changed = {**table, _POSITIONS: seq_len}
    if kind != "none":
        key = "rope_scaling" if table.get("rope_scaling") or "rope_parameters" not in table else "rope_parameters"
        rope = table.get(key) or {}
        before = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else None
        if before not in ("default", kind):
            problem = f"the checkpoint has rotary positions of the kind {shown(str(before))}, not {kind}"
            advice = "--rope-scaling none, or a config.json with the rotary scaling that you mean"
            raise FindingsError([Finding("--rope-scaling", problem, advice=advice, rule="context-fits-checkpoint")])
        original = rope.get("original_max_position_embeddings")
        original = original if type(original) is int and original > 0 else positions
        rest = {name: value for name, value in rope.items() if name != "type"}
        changed[key] = {
            **rest,
            "rope_type": kind,
            "factor": seq_len / original,
            "original_max_position_embeddings": original,
        }
    return changed if table is config else {**config, "text_config": changed}


def _text_table(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, Mapping) and _POSITIONS not in config else config
