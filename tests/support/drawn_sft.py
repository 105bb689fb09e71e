"""Fine-tuning drawn at random for the oracle: a layout of `drawn_layouts.py` that trains on conversations.

`draw_sft` draws the job's data: shards with masks or records of every form, one source or several with shares or
epochs, and what the run evaluates on; packing, sequences of dynamic length, adapters and MTP depths. The files are
written into a folder, because the engine reads them as it reads those of a user. `run_sft` compares with one rank.
"""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from drawn_layouts import Drawn, draw_layout
from layout_runs import LIMIT_SECONDS, Outcome, run_draw
from tiny_mixtures import MIXTURES
from tiny_models import FAMILIES

from threefold.engine.data.shard_writer import ShardWriter
from threefold.engine.data.text.tokenizer import ByteTokenizer
from threefold.engine.data.token_shard import CONTINUES
from threefold.plan.plan import LORA_TARGETS

_FAMILIES = (*FAMILIES, *MIXTURES)
_FORMS = ("shard", "shard", "shard", "folder", "completion", "instruction", "sharegpt", "messages")
_WORDS = ("a", "be", "sea", "dune", "river", "mountains")
# Bytes of a sequence, so that some answers begin in it.
_ROOM = {"completion": 12, "instruction": 48, "sharegpt": 64, "messages": 64}


def run_sft(seed: int | str, folder: Path, limit: float = LIMIT_SECONDS) -> Outcome:
    """The outcome of a draw, whose data is written into the folder. A split that is left with nothing is refused."""
    outcome = run_draw(draw_sft(seed, folder), limit=limit, reads_data=True)
    if outcome.kind == "CRASH" and "FindingsError: error[data-empty]" in outcome.said:
        return replace(outcome, kind="refused", said="data-empty")
    return outcome


def draw_sft(seed: int | str, folder: Path) -> Drawn:
    """The draw of a seed. Its data is in the folder; the same seed writes the same data."""
    draw, drawn = random.Random(f"sft {seed}"), _draw_layout(seed)
    form = draw.choice(_FORMS)
    config, fields = dict(drawn.config), {**drawn.fields, "job.task": "sft", "job.routing": None}
    if form in _ROOM:  # text, encoded as bytes
        config["vocab_size"] = ByteTokenizer.vocab + draw.randrange(12)
        fields["job.seq_len"] *= -(-_ROOM[form] // fields["job.seq_len"])
    data = _Data(draw, form, folder, config["vocab_size"], fields["job.seq_len"])
    names = [data.write(f"source{number}") for number in range(draw.choice((1, 1, 2, 3)))]
    fields["job.data"] = _with_marks(draw, names)
    fields |= _draw_evaluation(draw, data) | _draw_adapters(draw, drawn.fields)
    fields["job.packing"] = draw.random() < 0.5
    fields["job.dynamic_length"] = draw.random() < 0.4
    return replace(drawn, config=config, fields={path: value for path, value in fields.items() if value is not None})


def _draw_layout(seed: int | str) -> Drawn:
    """A layout of four ranks or less, where one of a few draws is one: data needs no more to be dealt out wrongly."""
    draws = (draw_layout(f"sft {seed}/{number}", _FAMILIES, as_trained=False) for number in range(4))
    return min(draws, key=lambda drawn: max(4, drawn.fields["cluster.gpus"]))


def _with_marks(draw: random.Random, names: list[str]) -> list[str]:
    """The entries of `job.data`: all of them with a share, or none of them, and epochs where it is none."""
    if draw.random() < 0.4:
        return [f"{name}:{draw.choice((0.1, 1, 2.5))}" for name in names]
    return [name + draw.choice(("", "", ":2x", ":0.5x")) for name in names]


def _draw_evaluation(draw: random.Random, data: "_Data") -> dict[str, Any]:
    fields: dict[str, Any] = {"run.eval_every": 1, "run.eval_batches": draw.choice((1, 2, 3, 5))}
    kind = draw.choice(("split", "one", "several", "several", "none"))
    if kind == "none":
        return {}
    if kind == "split":
        return fields | {"job.val_fraction": draw.choice((0.1, 0.3, 0.5))}
    names = [data.write(f"held{number}") for number in range(1 if kind == "one" else draw.choice((2, 3)))]
    return fields | {
        "job.val_data": [f"set-{n}={name}" if draw.random() < 0.5 else name for n, name in enumerate(names)]
    }


def _draw_adapters(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    if "job.lora_rank" in fields or draw.random() < 0.6:
        return {}
    targets = draw.sample(LORA_TARGETS, draw.randint(1, len(LORA_TARGETS)))
    rank, alpha = draw.choice((1, 2, 3, 8)), draw.choice((None, 1.0, 5.0))
    return {"job.lora_rank": rank, "job.lora_alpha": alpha, "job.lora_targets": targets, "job.freeze": None}


class _Data:
    """Writes sources of one form."""

    def __init__(self, draw: random.Random, form: str, folder: Path, vocab: int, seq_len: int) -> None:
        self.draw, self.form, self.folder, self.vocab, self.seq_len = draw, form, folder, vocab, seq_len
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, name: str) -> str:
        """Write a source of some conversations; returns its path."""
        count = self.draw.randrange(6, 30)
        if self.form == "shard":
            return self._write_shard(self.folder / f"{name}.tok", count)
        if self.form == "folder":
            for number in range(self.draw.choice((2, 3))):
                self._write_shard(self.folder / name / f"{number}.tok", count)
            return str(self.folder / name)
        path = self.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(self._record()) + "\n" for _ in range(count)), encoding="utf-8")
        return str(path)

    def _write_shard(self, path: Path, count: int) -> str:
        with ShardWriter(path, self.vocab, "drawn") as writer:
            for number in range(count):
                length = self.draw.choice((2, 3, self.draw.randrange(2, 2 * self.seq_len)))
                mask = self._mask(length)
                if number == 0:  # something to learn, whatever is drawn for the others
                    mask[1] = 1
                elif self.draw.random() < 0.2:
                    mask[0] |= CONTINUES
                writer.add([self.draw.randrange(self.vocab) for _ in range(length)], mask)
        return str(path)

    def _mask(self, length: int) -> list[int]:
        """Turns of prompt and answer by turns; no answer at all in one document of seven."""
        mask: list[int] = []
        while len(mask) < length:
            mask += [0] * self.draw.randrange(1, 8) + [1] * self.draw.randrange(1, 8)
        return [0] * length if self.draw.randrange(7) == 0 else mask[:length]

    def _words(self, most: int = 3) -> str:
        return " ".join(self.draw.choice(_WORDS) for _ in range(self.draw.randint(1, most)))

    def _record(self) -> dict[str, Any]:
        answer = self._words()
        if self.form == "completion":
            return {"prompt": self.draw.choice(_WORDS[:3]), "completion": answer}
        if self.form == "instruction":
            return {"instruction": self.draw.choice(_WORDS[:3]), "output": answer}
        turns = [(role, self._words(2)) for _ in range(self.draw.choice((1, 1, 2))) for role in ("user", "assistant")]
        if self.form == "messages":
            return {"messages": [{"role": role, "content": text} for role, text in turns]}
        names = {"user": "human", "assistant": "gpt"}
        return {"conversations": [{"from": names[role], "value": text} for role, text in turns]}
