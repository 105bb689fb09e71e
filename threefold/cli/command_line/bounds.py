"""The bounds of every verb: how large the files are that it reads, and what its time and memory grow with.

`--help` and the page of commands print them. `docs/security.md` has the reasons. Numbers stand here as text, because
the help of a verb loads neither torch nor a reader; `tests/cli/test_bounds.py` compares them with the readers' own.
"""

_PLAN = "plans and chip files of 1 MiB, a config.json of 64 MiB"
_TRACES = (
    "traces of 64 GiB unpacked, streamed, with 64 MiB an event and 40,000,000 events that are kept; exports of Nsight "
    "Systems within 300 s"
)
_METRICS = "metrics of a run line by line, 1 MiB each"
_CHECKPOINT = "manifests and indexes of checkpoints of 256 MiB, weights tensor by tensor, none larger than its file"
_TOKENIZER = "tokenizers of 64 MiB and 1,500,000 entries"
_TEXTS = "documents of 64 MiB one after the other, JSON lists of 1 GiB, images of 256 MiB"
_LEDGER = "ledgers of 64 MiB and 100,000 rows"
_SECONDS = "Answers in seconds, whatever the number of GPUs."
_AT_ONCE = "Answers at once."

# By verb: the files that it reads, with their largest sizes, and its time and memory. A larger file is a finding.
BOUNDS: dict[str, tuple[tuple[str, ...], str]] = {
    "plan": ((_PLAN,), "Answers in seconds, or in about a minute where few layouts fit."),
    "fit": ((_PLAN,), "A search for each number of GPUs: seconds each."),
    "check": ((_PLAN,), "Tries at most 150 plans for its fixes: seconds."),
    "show": ((_PLAN,), _SECONDS),
    "estimate": ((_PLAN, "loads of experts of 64 MiB"), "Answers in seconds; a curve has at most 200 sizes."),
    "dry-run": (
        (_PLAN,),
        "Refuses more than 32,768 microbatches or 20,000 passes of layers, which cannot end; else seconds a rank, and "
        "memory that does not grow with the tokens.",
    ),
    "sweep": ((_PLAN,), "A plan for each value: seconds each."),
    "train": (
        (_PLAN, _CHECKPOINT, _TOKENIZER, _TEXTS),
        "Runs for job.steps; refuses more processes than memory has room for; data is read batch by batch.",
    ),
    "finetune": (
        (_PLAN, _CHECKPOINT, _TOKENIZER, _TEXTS),
        "Runs for the epochs or steps asked for; the plan is chosen for the memory that is free.",
    ),
    "calibrate": ((_PLAN,), "Measures for --budget, 170 s without it."),
    "launch": ((_PLAN,), "Starts nothing, and answers in seconds."),
    "export": ((_PLAN,), _SECONDS),
    "import": (("a file of 16 MiB",), _AT_ONCE),
    "verify": ((_PLAN,), "The ranks may take --limit, 10 minutes without it; a hang is an error."),
    "overlap-ab": ((_PLAN,), "The ranks may take --limit, 10 minutes without it."),
    "compare": (
        (_PLAN, _TRACES, _METRICS, "results of profile of 16 MiB"),
        "Time grows with the files; of a run's metrics at most 3,000,000 lines are read.",
    ),
    "contract": ((_PLAN, "logs line by line, 32 KiB each", "contracts of 4 MiB"), "Time grows with the logs."),
    "validate": (
        (_METRICS, _TRACES, "logs line by line, 32 KiB each", "contracts of 4 MiB"),
        "Time grows with the files.",
    ),
    "regress": ((_PLAN,), "Each trial may take --limit, 10 minutes without it; the last 4 MiB of its output are kept."),
    "profile": (
        (_TRACES, _METRICS),
        "Time grows with the trace; of a run the last 100,000 steps and at most 4,096 traces are read.",
    ),
    "diagnose": (
        (
            "logs line by line, 32 KiB each",
            "memory snapshots of 256 MiB",
            "dumps of the flight recorder of 128 MiB",
        ),
        "Time grows with the files, memory does not grow with a log.",
    ),
    "tune": (
        (_PLAN, _LEDGER),
        "Measures for --budget, 8 minutes without it; a trial that hangs is ended after 10 minutes or six times what "
        "it should take.",
    ),
    "load": ((_PLAN, _METRICS, "loads of experts of 64 MiB"), "Answers in seconds."),
    "report": (
        (_PLAN, _LEDGER, _METRICS, "traces of a run of 16 MiB together, compressed"),
        "Answers in seconds; curves have at most 240 points.",
    ),
    "explore": (
        (),
        "Listens until it is stopped: at most 32 connections, 16 KiB a request, 120 s a rehearsal.",
    ),
    "card": (("cards of 256 KiB, evidence of 64 MiB",), "A check may take four times the minutes that the card names."),
    "eval": (
        (_CHECKPOINT, _TOKENIZER, _TEXTS, "questions of multiple choice of 16 MiB a line"),
        "Time grows with the data; what memory cannot hold is a finding.",
    ),
    "sample": ((_CHECKPOINT, _TOKENIZER), "Writes at most --max-tokens for each prompt."),
    "tokenize": ((_TOKENIZER, _TEXTS), "Time grows with the texts, memory does not."),
    "import-hf": ((_CHECKPOINT, _TOKENIZER), "Time grows with the weights, memory with the largest tensor."),
    "export-hf": ((_CHECKPOINT, _TOKENIZER), "Time grows with the weights, memory with a file of 5 GB."),
    "find": ((), "Answers at once, with at most 100 entries."),
    "mcp": ((_PLAN,), "Serves until it is stopped; each call has at most 120 s, 4 GiB and 200,000 characters."),
    "skills": ((), _AT_ONCE),
    "rules": ((), _AT_ONCE),
    "models": (("a config.json of 64 MiB",), _AT_ONCE),
    "chips": (("chip files of 1 MiB",), _AT_ONCE),
    "schema": ((), _AT_ONCE),
    "completion": ((), _AT_ONCE),
    "env": ((), "Each package is imported in a process of its own, within 120 s."),
}


def bounds_of(verb: str) -> str:
    """The bounds of a verb in sentences."""
    files, costs = BOUNDS[verb]
    return f"Reads at most: {'; '.join(files)}. {costs}" if files else costs
