"""Opens the validation sets of a job: those of `job.val_data`, or the part of the data that is held out.

`build.py` calls `open_validation`, and `threefold finetune` `check_data`. Each set has a name and, in the metrics of a
run, a curve `eval/NAME/loss`.
"""

from collections.abc import Callable
from dataclasses import replace

from threefold.engine.data.loader import Loader
from threefold.findings import Finding, FindingsError
from threefold.plan.data_entries import parse_validation
from threefold.plan.plan import Job, Plan

HELD_OUT = "held-out"  # the name of the set that is split off the data


def held_out_share(job: Job, evaluates: bool) -> float:
    """The share of the data that is held out for evaluation: none where the job has validation data of its own."""
    return job.val_fraction if evaluates and job.val_data is None else 0.0


def open_validation(job: Job, training: Loader, open_loader: Callable[[Job], Loader]) -> dict[str, Loader]:
    """The validation sets by name. `open_loader` opens the evaluation part of a job's data.

    Raises the findings of all sets at once.
    """
    sets = parse_validation(job.val_data)
    if not sets:
        return {HELD_OUT: open_loader(job)}
    opened: dict[str, Loader] = {}
    findings: list[Finding] = []
    for name, entry in sets.items():
        try:
            opened[name] = open_loader(replace(job, data=entry))
        except FindingsError as error:
            findings += [
                replace(finding, at="job.val_data") if finding.at == "job.data" else finding
                for finding in error.findings
            ]
    labels = training.tokenizer_labels
    for name, loader in opened.items():
        if labels and not loader.tokenizer_labels <= labels:
            others = ", ".join(sorted(loader.tokenizer_labels - labels))
            problem = (
                f"the validation set {name} was made with the tokenizer {others}, the data with {', '.join(labels)}"
            )
            advice = "name the tokenizer of the data in job.tokenizer, and tokenize the set with it"
            findings.append(Finding(rule="data-one-tokenizer", at="job.val_data", problem=problem, advice=advice))
    if findings:
        for loader in opened.values():
            loader.close()
        raise FindingsError(findings)
    return opened


def check_data(plan: Plan) -> float:
    """Open all data of a plan once and close it; returns the sequences of an epoch. Raises what a run would.

    `threefold finetune` calls it before it imports weights, which may take long. Text is encoded here, and the run
    finds its tokens in the cache.
    """
    share = held_out_share(plan.job, bool(plan.run.eval_every))

    def open_loader(job: Job, evaluation: bool = True) -> Loader:
        return Loader(
            job,
            plan.model.vocab,
            seed=plan.job.seed,
            held_out=share,
            evaluation=evaluation and share > 0,
            prefetch=0,
            vision=plan.model.vision,
        )

    training = open_loader(plan.job, evaluation=False)
    try:
        if plan.run.eval_every:
            for loader in open_validation(plan.job, training, open_loader).values():
                loader.close()
        return training.epoch_sequences()
    finally:
        training.close()
