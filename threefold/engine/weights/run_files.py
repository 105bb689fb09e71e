"""Files of a run's folder that come from a Hugging Face checkpoint beside its weights, and copying them.

`import_hf` copies tokenizer, chat template and generation settings into the folder `tokenizer` of a run, so that the
run does not depend on where the checkpoint lay; `export_hf` copies them out again.
"""

import json
import shutil
from pathlib import Path

from threefold.engine.data.text.tokenizer_files import COPIED, TEMPLATES, copy_tokenizer
from threefold.findings import Finding, FindingsError
from threefold.safe_files import MAX_JSON_BYTES, check_inside, read_bounded, read_json_object, write_aside
from threefold.spec.hf import model_from_dict
from threefold.spec.longer_context import with_positions

HF_CONFIG = "hf_config.json"  # the imported config.json
DRAFT = "plan.draft.toml"  # the plan that an import writes
TOKENIZER_FOLDER = "tokenizer"
GENERATION = "generation_config.json"


def copy_model_files(source: Path, out: Path) -> list[str]:
    """Copy what is there of a tokenizer, its chat templates and generation settings; returns the names of the files.

    A link that leads out of the folder is a finding: the copy may be published, and must not hold a file of the user.
    """
    for path in [*(source / name for name in (*COPIED, GENERATION)), *(source / TEMPLATES).glob("*.jinja")]:
        try:
            check_inside(path, source)
        except OSError as error:
            advice = "remove it, or put the file itself there"
            raise FindingsError(
                [Finding(rule="convertible", at=str(path), problem=f"is not copied: {error}", advice=advice)]
            ) from None
    copied = copy_tokenizer(source, out)
    try:
        settings = read_bounded(source / GENERATION, MAX_JSON_BYTES)
    except OSError:  # many checkpoints have none
        return copied
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_aside(out / GENERATION, settings)
    except OSError as error:
        problem, advice = f"cannot be written: {error.strerror or error}", "give a folder that can be written"
        found = Finding(rule="file-writable", at=str(out / GENERATION), problem=problem, advice=advice)
        raise FindingsError([found]) from None
    return [*copied, GENERATION]


def keep_tokenizer(folder: Path, tokenizer: str | None) -> None:
    """Copy the tokenizer that a plan names into the folder of its run, unless the run has one already.

    The copy appears when it is complete: a start that was killed in the middle of it would leave one without its chat
    template, and a reader would see it so.
    """
    kept = folder / TOKENIZER_FOLDER
    if tokenizer is None or kept.exists():
        return
    aside = kept.with_name(f"{TOKENIZER_FOLDER}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        if copy_model_files(Path(tokenizer), aside):
            aside.rename(kept)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_longer_config(config: Path, run: Path, seq_len: int, rope_scaling: str) -> Path:
    """Write a configuration into a run's folder, with positions that reach its sequences; returns its path."""
    try:
        longer = with_positions(read_json_object(config, within=config.parent), seq_len, rope_scaling)
        model_from_dict(longer, name=str(config), source=str(config))  # raises what no model can have
        run.mkdir(parents=True, exist_ok=True)
        write_aside(run / HF_CONFIG, (json.dumps(longer, indent=2) + "\n").encode())
    except (OSError, ValueError) as error:
        advice = "give a model by its config.json, and a folder that can be written"
        found = Finding(
            rule="context-fits-checkpoint", at=str(config), problem=f"is not stretched: {error}", advice=advice
        )
        raise FindingsError([found]) from None
    return run / HF_CONFIG


def end_tokens(folder: Path) -> set[int]:
    """The tokens that end an answer, by the generation settings in a folder; none where there are no settings."""
    try:
        found = read_json_object(folder / GENERATION).get("eos_token_id")
    except (OSError, ValueError):
        return set()
    tokens = found if isinstance(found, list) else [found]
    return {token for token in tokens if isinstance(token, int) and not isinstance(token, bool)}
