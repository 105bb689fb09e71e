"""Exports drawn at random: a small model of any family trains for a step or two, and transformers reads its export.

`run_export` draws a configuration and a layout, trains in it from random weights or from a checkpoint of transformers,
and exports. The folder must load without a missing or a surplus weight, with the bits of the run's checkpoint, and give
the engine's logits; imported again it must be the run's checkpoint. Adapters are read by PEFT.
"""

import contextlib
import io
import json
import os
import random
import re
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import peft
import tiny_vision
import torch
import transformers
from drawn_layouts import Drawn, Resolved, draw_layout, resolve
from hf_parity import EAGER, LOGITS
from huggingface_hub.errors import StrictDataclassError
from layout_runs import LIMIT_SECONDS, Outcome, stand_ins
from random_configs import draw_config
from safetensors.torch import load_file
from tiny_mixtures import MIXTURES
from tiny_models import FAMILIES
from torch import Tensor

from threefold.cli.main import main
from threefold.engine.dist.join import World
from threefold.engine.lora import is_adapter, lora_settings
from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.run.checkpoints import Checkpoints, read_checkpoint
from threefold.engine.run.folder import CHECKPOINTS
from threefold.engine.train import train
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.weights.hf_names import hf_layouts
from threefold.engine.weights.imported_weights import INITIAL
from threefold.engine.weights.model_shapes import MODEL
from threefold.engine.weights.peft import MergedTensors
from threefold.engine.weights.write_hf import write_hf
from threefold.plan.parse import parse
from threefold.plan.plan import Plan
from threefold.spec.hf import model_from_dict

_FAMILIES = (*FAMILIES, *MIXTURES, *tiny_vision.CONFIGS)
_MOST_RANKS = 4  # of a draw: what an export depends on is the model
_TRIES = 40  # draws of a seed until the rules accept one
_LENGTH = 13


def run_export(seed: int | str, folder: Path, limit: float = LIMIT_SECONDS) -> Outcome:
    """What became of a draw: equal, DIFFERENT, CRASH or refused."""
    torch.set_num_threads(1)
    drawn, resolved = _accepted(str(seed))
    if resolved.plan is None:
        return Outcome(drawn, resolved, "refused", ", ".join(resolved.refusals))
    try:
        export = _Export(random.Random(f"export {seed}"), drawn, resolved.plan, folder)
        with stand_ins(resolved.plan):
            differences = export.differences(limit)
    except CommandError as error:
        return Outcome(drawn, resolved, "DIFFERENT", str(error))
    except Exception:  # whatever it is, the draws after this one are still to be run
        return Outcome(drawn, resolved, "CRASH", traceback.format_exc())
    return Outcome(drawn, resolved, "DIFFERENT" if differences else "equal", "; ".join(differences))


def _accepted(seed: str) -> tuple[Drawn, Resolved]:
    """The first draw of the seed that the rules accept, possibly repaired."""
    draw = random.Random(f"export model {seed}")
    family, any_config = draw.choice(_FAMILIES), draw.random() < 0.6
    for number in range(_TRIES):
        drawn = draw_layout(f"export {seed}/{number}", (family,), as_trained=False)
        config = drawn.config
        if any_config and family not in tiny_vision.CONFIGS:
            config = draw_config(f"{seed}/{number}", (family,))
        drawn = Drawn(drawn.seed, config, drawn.fields | _fields(draw))
        resolved = resolve(drawn)
        if resolved.plan is not None and resolved.plan.layout.gpus <= _MOST_RANKS and _is_configuration(config):
            return drawn, resolved
    return drawn, resolved


def _is_configuration(config: Mapping[str, Any]) -> bool:
    """Whether transformers takes it: its Llama wants a width that the number of heads divides, whatever `head_dim`, and
    classes with a `head_dim` want a number."""
    try:
        transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
    except StrictDataclassError:
        return False
    return True


def _fields(draw: random.Random) -> dict[str, Any]:
    """One or two steps that move every weight far: one in the wrong place could not hide."""
    return {
        "job.task": "pretrain",
        "job.steps": draw.choice((1, 2)),
        "job.lr": 0.03,
        "job.warmup_steps": 0,
        "knobs.precision": draw.choice(("fp32", "fp32", "bf16")),
        "run.tensorboard": False,
    }


class CommandError(AssertionError):
    """A command of threefold ended with another code than 0."""


class _Export:
    """One drawn run, its export, and what is read of it."""

    def __init__(self, draw: random.Random, drawn: Drawn, plan: Plan, folder: Path) -> None:
        self.draw, self.folder, self.run, self.out = draw, folder, folder / "run", folder / "out"
        hf = folder / "hf"
        hf.mkdir(parents=True)
        (hf / "config.json").write_text(json.dumps(drawn.config), encoding="utf-8")
        # transformers saves no MTP depth to train on from, and a checkpoint has positions for its own length.
        positions = drawn.config.get("text_config", drawn.config).get("max_position_embeddings", 0)
        is_whole = not (plan.mtp and plan.model.mtp_layers) and plan.job.seq_len <= positions
        if draw.random() < 0.5 and is_whole and self._save_checkpoint(hf, drawn.config):
            dtype = "fp32" if plan.knobs.precision == "fp32" else "bf16"
            _command("import-hf", str(hf), "--out", str(self.run), "--dtype", dtype)
        written = {path: value for path, value in plan.written if path != "model"}
        parsed = parse({**written, "model": f"hf:{hf}"})
        assert parsed.plan is not None, parsed.findings
        self.plan = parsed.plan

    def _save_checkpoint(self, hf: Path, config: dict[str, Any]) -> bool:
        """Whether transformers has a model for this configuration; then it is saved with weights that hide nothing."""
        torch.manual_seed(self.draw.randrange(10_000))
        try:
            made = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
            model = _class_of(config).from_config(made, **EAGER)
        except Exception:  # whatever it raises, it does not run this model
            return False
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.add_(torch.randn_like(tensor) * 0.1)
        model.save_pretrained(hf)
        return True

    def differences(self, limit: float) -> list[str]:
        """What is not as it must be."""
        run_ranks(self.plan.layout.gpus, _train, self.plan, self.run, limit=limit)
        _command("export-hf", str(self.run), "--out", str(self.out))
        checkpoint = Checkpoints(self.run / CHECKPOINTS, 1)
        tensors, _ = read_checkpoint(checkpoint.path(checkpoint.steps()[-1]))
        state: Mapping[str, Tensor] = {
            name.removeprefix(MODEL): value for name, value in tensors.items() if name.startswith(MODEL)
        }
        settings = lora_settings(self.plan.job)
        whole = state if settings is None else MergedTensors(state, settings)
        read = read_by_transformers(self.out)
        found = [*read.problems, *self._other_weights(read.model, whole), *self._other_weights_imported(whole)]
        tokens = torch.randint(1, min(60, self.plan.model.vocab), (2, _LENGTH))
        with torch.no_grad():
            found += _other_logits("exported", read.model, tokens, self._logits(whole, tokens))
            if settings is not None and self.plan.model.vision is None:
                found += self._other_adapters(state, tokens)
        return found

    def _logits(self, state: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        """The engine's in fp32, which holds bf16 exactly. What it computes from weights is in fp32 too."""
        has_adapters = any(is_adapter(name) for name in state)
        options = Options(lora=lora_settings(self.plan.job) if has_adapters else None)
        model = build_model(self.plan.model, self.plan.mtp, torch.float32, options=options).eval()
        model.load_state_dict({name: value.float() for name, value in state.items()})
        logits = model(tokens).logits
        assert logits is not None
        return logits

    def _other_weights(self, model: Any, whole: Mapping[str, Tensor]) -> Iterator[str]:
        """Weights of the model in transformers that are not those of the run, or that the run does not have."""
        theirs, seen = model.state_dict(), set()
        for name in whole:
            if name.startswith("mtp."):  # transformers has no MTP depths
                continue
            layouts = hf_layouts(name, self.plan.model)
            layout = next((each for each in layouts if all(part.key in theirs for part in each)), None)
            if layout is None:
                yield f"transformers has no {name}"
                continue
            for part in layout:
                seen.add(part.key)
                if not torch.equal(part.read(whole[name]).double(), theirs[part.key].double()):
                    yield f"{part.key} has other bits"
        tied = {"lm_head.weight"} if self.plan.model.tied else set()
        yield from (f"the run has no {key}" for key in theirs.keys() - seen - tied)

    def _other_weights_imported(self, whole: Mapping[str, Tensor]) -> Iterator[str]:
        """Weights that the export, imported again, does not have as the run has them."""
        dtype, again = self.draw.choice(("auto", "fp32")), self.folder / "again"
        _command("import-hf", str(self.out), "--out", str(again), "--dtype", dtype)
        found = {name: value for path in (again / INITIAL).iterdir() for name, value in load_file(path).items()}
        config = json.loads((self.out / "config.json").read_text(encoding="utf-8"))
        has_depths = model_from_dict(config, name="exported", source="test").mtp_layers >= self.plan.mtp
        wanted = {name for name in whole if has_depths or not name.startswith("mtp.")}
        yield from (f"{name} is not imported" for name in wanted ^ found.keys())
        for name in whole.keys() & found.keys():
            if not torch.equal(found[name], whole[name].to(found[name].dtype)):
                yield f"{name} is imported with other bits"
            elif dtype == "auto" and found[name].dtype != whole[name].dtype:
                yield f"{name} is imported in {found[name].dtype}, and was {whole[name].dtype}"

    def _other_adapters(self, state: Mapping[str, Tensor], tokens: Tensor) -> Iterator[str]:
        """Whether PEFT, with the exported adapters on the frozen weights, has the engine's logits."""
        said = _command("export-hf", str(self.run), "--out", str(self.folder / "adapter"), "--adapter")
        if "PEFT refuses" in said:
            if "nemotron_h" not in said:
                yield said
            return
        base = {name: value for name, value in state.items() if not is_adapter(name)}
        write_hf(base, self.plan.model, self.folder / "base")
        read = read_by_transformers(self.folder / "base")
        yield from read.problems
        with_adapter = peft.PeftModel.from_pretrained(read.model, self.folder / "adapter")
        yield from _other_logits("with its adapters in PEFT", with_adapter, tokens, self._logits(state, tokens))


class _Read:
    """A model as transformers reads it, in fp32, which holds bf16 exactly, and what it says is wrong."""

    def __init__(self, model: Any, told: Mapping[str, Any]) -> None:
        self.model, layers = model, model.config.get_text_config().num_hidden_layers
        names = ("missing_keys", "unexpected_keys", "mismatched_keys")
        keys = {name: [str(key) for key in told[name] if not _is_of_mtp(str(key), layers)] for name in names}
        self.problems = [f"{name}: {sorted(found)}" for name, found in keys.items() if found]


def _is_of_mtp(key: str, num_layers: int) -> bool:
    """Whether a weight belongs to an MTP depth: a layer after the last, which transformers does not read."""
    layer = re.match(r"model\.layers\.(\d+)\.", key)
    return key.startswith("mtp.") or (layer is not None and int(layer[1]) >= num_layers)


def read_by_transformers(folder: Path) -> _Read:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model, told = _class_of(config).from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **EAGER)
    return _Read(model.eval(), told)


def _class_of(config: Mapping[str, Any]) -> Any:
    with_pictures = "vision_config" in config
    return transformers.AutoModelForImageTextToText if with_pictures else transformers.AutoModelForCausalLM


def _other_logits(what: str, model: Any, tokens: Tensor, logits: Tensor) -> Iterator[str]:
    theirs = model(input_ids=tokens, use_cache=False).logits
    gap = float((theirs - logits).abs().max() / theirs.abs().max())
    if not gap <= LOGITS:
        yield f"logits {what} differ by {gap:.1e}"


def _train(rank: int, plan: Plan, run: Path) -> None:
    with contextlib.redirect_stderr(io.StringIO()):
        train(plan, run, lambda text: None, world=World(rank, plan.layout.gpus, rank, torch.device("cpu"), 0))


def _command(*words: str) -> str:
    """Run a command of threefold, which must end well; returns what it said."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(list(words))
    if code != 0:
        raise CommandError(f"{' '.join(words)}: {said.getvalue()}")
    return said.getvalue()
