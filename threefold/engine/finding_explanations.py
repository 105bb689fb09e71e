"""Explanations of the findings that the engine, the data loader, launching and rehearsals raise.

A finding is a problem that is reported to the user (`threefold/findings.py`), named by its slug. `threefold check
--explain SLUG` prints the explanation: what should hold, why, how to confirm a problem, and how to fix it. Explanations
of rules are the rules' docstrings, and those of parsing are in `plan/explain.py`. This module imports no torch.
"""

from threefold.findings import Explanation

EXPLANATIONS = {
    "steps-are-measured": Explanation(
        what="A calibration measures at least one step.",
        why="Rates are fitted to steps; without any there is nothing to fit.",
        confirm="`threefold calibrate` says of each plan why it could not be measured.",
        fix="Give more time with `--budget`, or mend what the first plan met.",
    ),
    "shard-readable": Explanation(
        what="A token shard is whole and of a known version.",
        why="A damaged shard would train on noise.",
        confirm="Open it again after checking size and disk; docs/reference/data-format.md has the format.",
        fix="Make it anew with `threefold tokenize`.",
    ),
    "text-readable": Explanation(
        what="Text to be tokenized can be read.",
        why="A file that is skipped silently changes the data.",
        confirm="Open the file the message names.",
        fix="Correct the path or the encoding.",
    ),
    "chat-readable": Explanation(
        what="A chat has messages with a role and text.",
        why="Loss masks follow the roles.",
        confirm="Look at the line the message names; docs/reference/data-format.md has the form.",
        fix="Correct the line.",
    ),
    "data-empty": Explanation(
        what="There is data to train on.",
        why="A run without samples would wait for ever.",
        confirm="Count the documents of the source.",
        fix="More data, or a shorter job.seq_len.",
    ),
    "data-weights": Explanation(
        what="All entries of a mixture have a weight above 0, or none has.",
        why="A share of nothing means nothing.",
        confirm="Read job.data.",
        fix="Give all a weight (path:0.3), or none: then sizes decide.",
    ),
    "data-fits-vocab": Explanation(
        what="Tokens of the data are in the model's vocabulary.",
        why="The model has no row for another one.",
        confirm="Compare the shard's vocabulary with model.vocab.",
        fix="Tokenize with the model's own tokenizer.",
    ),
    "data-one-tokenizer": Explanation(
        what="Shards of a mixture have one tokenizer.",
        why="A number would be another word in each of them.",
        confirm="The message names them.",
        fix="Tokenize all of them with one.",
    ),
    "data-fits-task": Explanation(
        what="Fine-tuning has data of conversations.",
        why="The loss is on answers, which a mask tells apart.",
        confirm="Look how the shard was made.",
        fix="Tokenize JSONL with messages, or pretrain on it.",
    ),
    "data-unchanged": Explanation(
        what="A resumed run reads the data it began with, wherever that lies now.",
        why="Another mixture would continue another run. Content is compared, with `sources` in contract.json: the "
        "tokenizer by its SHA-256, numbers of tokens, documents and samples, and the fingerprint of each shard.",
        confirm="The message names each fact that differs. Evaluation (run.eval_every) holds samples out.",
        fix="Give the data as it was; or go on with other data in a new run: `threefold train PLAN --from RUN`.",
    ),
    "ranks-see-the-same": Explanation(
        what="All ranks have the same plan, and see the same data and imported weights.",
        why="Each rank reads its own files. With another plan it would wait for ever; with another copy of the data or "
        "weights it would train on, and no number of the run would say so. The embedded corpus is made of each "
        "machine's own Python sources.",
        confirm="Compare the files, or the Python versions, of the two nodes.",
        fix="A file system that all nodes share, or equal copies; with another Python, shards in place of 'embedded'.",
    ),
    "tokenizer-readable": Explanation(
        what="The tokenizer file can be read.",
        why="Tokens mean nothing without it.",
        confirm="Open it with the tokenizers library.",
        fix="Give a tokenizer.json, or use bytes.",
    ),
    "tokenizers-installed": Explanation(
        what="The tokenizers package is there when a tokenizer file is used.",
        why="It reads the file.",
        confirm="Import tokenizers.",
        fix="pip install 'threefold[train]', or use bytes.",
    ),
    "file-writable": Explanation(
        what="Files can be written where they are asked for.",
        why="A half-written shard is removed again.",
        confirm="Check space and rights of the folder.",
        fix="Free space, or choose another path.",
    ),
    "hf-weights": Explanation(
        what="A Hugging Face checkpoint has every weight of the model in the right shape.",
        why="A missing tensor would stay random.",
        confirm="Compare the index with the names in the message.",
        fix="Complete the checkpoint.",
    ),
    "convertible": Explanation(
        what="A checkpoint can be imported or exported here, and what was imported is the plan's model.",
        why="Nothing is overwritten; a weight that is missing would stay random.",
        confirm="Look into the folder the message names.",
        fix="Choose another folder, train first, import again, or train the model that was imported.",
    ),
    "checkpoint-is-there": Explanation(
        what="A checkpoint stays where it is while it is read.",
        why="A run removes checkpoints that are older than its newest ones; one that is being read it leaves until its "
        "next save, unless the file system has no locks.",
        confirm="List the checkpoints of the run, on every machine that reads them.",
        fix="Give the command again, or keep more checkpoints with run.keep.",
    ),
    "checkpoint-whole": Explanation(
        what="A checkpoint has every file that is read, with its size and checksum, and is that of its folder's step.",
        why="A flipped bit in a weight trains on unnoticed; and a checkpoint may come from somebody else.",
        confirm="Compare the file with manifest.json.",
        fix="Restore or delete the folder: then the checkpoint before it is used. Training goes back to it by itself.",
    ),
    "checkpoint-writable": Explanation(
        what="Checkpoints can be written.",
        why="A run that cannot save loses what it learns.",
        confirm="Check the space of the run's folder.",
        fix="Free space; earlier checkpoints are untouched.",
    ),
    "run-is-this-plan": Explanation(
        what="A run folder holds one plan, and one model by its content.",
        why="Going on with another plan would mix two runs. A model `hf:config.json` is compared by what the file "
        "says, not by its path: weights fit into a model with another rope_theta or top-k, and are wrong in it.",
        confirm="The message names each field; plan.toml, and `model` in contract.json, have them as they were.",
        fix="The plan and model as they were, of which job.steps and run.* may change; another --run folder; or a new "
        "run from the weights of this one: `threefold train PLAN --from RUN`.",
    ),
    "run-is-alone": Explanation(
        what="A folder has one run at a time.",
        why="Two would write over each other's checkpoints and metrics.",
        confirm="The message names the process and machine that keep run.lock locked.",
        fix="Wait for its end, or choose another --run folder.",
    ),
    "run-writable": Explanation(
        what="The run's folder can be written.",
        why="Metrics and checkpoints go there.",
        confirm="Check rights and space.",
        fix="Choose another --run folder.",
    ),
    "run-readable": Explanation(
        what="A run's folder holds regular files and folders and no links out of it, and what is read is readable.",
        why="It may come from somebody else: a link, a device or a FIFO in it would be read or written in its place.",
        confirm="Look at the file that the message names: ls -l.",
        fix="Remove the file, or restore it.",
    ),
    "run-has-checkpoint": Explanation(
        what="A run that is sampled or exported has a checkpoint.",
        why="Weights come from it.",
        confirm="Look into checkpoints/ of the run.",
        fix="Train it first.",
    ),
    "prompt-fits-vocab": Explanation(
        what="Tokens of a prompt are in the model's vocabulary.",
        why="The model has no row for another one.",
        confirm="Compare the tokenizer's vocabulary with model.vocab of the run's plan.",
        fix="Give the tokenizer that the run's data was made with.",
    ),
    "memory-suffices": Explanation(
        what="What a command computes fits the memory of this machine.",
        why="A step or an evaluation that asks for more ends there; nothing of it is saved.",
        confirm="Compare the bytes in the message with the memory that is free.",
        fix="Shorter sequences, smaller microbatches or a smaller model; `threefold dry-run` says where a plan's goes.",
    ),
    "profile-has-steps": Explanation(
        what="A start with --profile has at least one step to profile.",
        why="A run that has ended computes nothing, so that there would be no trace and no word about it.",
        confirm="Compare the step that the message names with job.steps and --stop-at.",
        fix="Raise job.steps to the number in the message, or profile a new run (--run).",
    ),
    "loss-is-finite": Explanation(
        what="Loss and gradients are finite.",
        why="A step from a NaN destroys the weights, so it is skipped; many of them mean something is wrong.",
        confirm="Look at loss and grad_norm in metrics.jsonl.",
        fix="Lower job.lr, check the data.",
    ),
    "engine-family": Explanation(
        what="The engine has the model's family.",
        why="A guessed architecture would train something else.",
        confirm="`threefold models` shows the family.",
        fix="Use a family the message names.",
    ),
    "ranks-meet": Explanation(
        what="Ranks know who they are and where to meet, from torchrun's or Slurm's variables.",
        why="A rank that waits at the wrong place waits for ever.",
        confirm="Print the environment of the rank the message names.",
        fix="Start ranks with `threefold train --nproc`, torchrun, or a script of `threefold launch`.",
    ),
    "ranks-match-plan": Explanation(
        what="The ranks that were started can hold the plan's layout and share its batch.",
        why="A layout is cut for a number of ranks; more or fewer in whole multiples only change data parallelism.",
        confirm="`threefold show` prints the grids; divide the ranks by PP x lcm(TP x CP, EP x ETP).",
        fix="Start as many ranks as the message names, or change the plan.",
    ),
    "ranks-start-here": Explanation(
        what="A run is started where its GPUs are; on a CPU, where there is memory for a process a rank.",
        why="Two ranks on one GPU share its memory and deadlock NCCL; thousands of processes stop a machine.",
        confirm="Count the GPUs the machine shows, or its memory.",
        fix="`threefold launch --slurm` or `--torchrun` start it on the cluster.",
    ),
    "ranks-survive": Explanation(
        what="Ranks that fail are started again, a few times.",
        why="A fault that keeps coming back is no accident.",
        confirm="Read the tail shown above it, and logs/rank-N.log in the run's folder.",
        fix="Remove the cause and start again: the run goes on from its newest checkpoint; --max-restarts allows more.",
    ),
    "collective-arrives": Explanation(
        what="Every rank of a group comes to each of its collectives within the limit.",
        why="One missing rank lets all others wait, silently.",
        confirm="The message says which ranks did not come, and where they are.",
        fix="Look at those ranks: their machine, their data, their log. A longer limit if they were only slow.",
    ),
    "phase-progresses": Explanation(
        what="A phase with a limit makes progress within it.",
        why="A rank that stands still stops all others.",
        confirm="The message names the line it stands at and ranks behind.",
        fix="Look there, or give the phase a longer limit.",
    ),
    "script-options": Explanation(
        what="Options of a batch script are words its parser takes, and fit the plan.",
        why="Slurm reads #SBATCH lines before any shell could quote them.",
        confirm="Compare with `man sbatch`.",
        fix="Correct the option the message names.",
    ),
    "dispatcher-available": Explanation(
        what="The dispatcher of the plan can be used here.",
        why="A silent fallback would keep the speed of another one.",
        confirm="Import deep_ep, and compare its classes and the chip with the message.",
        fix="Install the package the message names, or set knobs.dispatcher to alltoall.",
    ),
    "checkpoint-fits": Explanation(
        what="A checkpoint has every tensor this plan needs, in its shape.",
        why="Weights that are not found would stay random.",
        confirm="Compare the names in the message with tensors in manifest.json.",
        fix="Go on with the plan the run was started with, or start a new run.",
    ),
    "layout-computes-the-same": Explanation(
        what="A layout computes what one rank computes.",
        why="Otherwise it trains another model.",
        confirm="`threefold verify PLAN --scale-down` again, with a layout of fewer axes.",
        fix="Report it with the plan; meanwhile use a layout that agrees.",
    ),
    "verify-fits-here": Explanation(
        what="The ranks of a verification run on this machine.",
        why="They are forked, and compute in fp64.",
        confirm="Count the ranks of the plan.",
        fix="Add --scale-down.",
    ),
    "rehearsal-runs": Explanation(
        what="The engine gets through a step of the plan.",
        why="What fails in a rehearsal fails on the cluster.",
        confirm=(
            "The message says which rank, module and phase, and what stopped there; `threefold dry-run --ranks N` "
            "repeats it."
        ),
        fix="Change what the place names; where the engine itself is at fault, report it with the plan.",
    ),
    "rehearsal-fits-memory": Explanation(
        what="The rehearsed peak of every stage fits the chip.",
        why="A rehearsal allocates what the run would, so that a peak over the memory ends the run in its first step.",
        confirm="`threefold dry-run` prints the peak by term and its largest tensors.",
        fix="The first piece of advice: the mildest remedy that frees enough.",
    ),
    "collectives-match": Explanation(
        what="All ranks of a process group call the same collectives in the same order, and messages find a receiver.",
        why="Otherwise ranks wait for each other until the watchdog ends the run, or read a tensor as another one.",
        confirm="`threefold dry-run PLAN --ranks all` names the first call, its ranks and their lines.",
        fix="It is a fault of the engine: report it with the plan. Meanwhile do without what the named modules share.",
    ),
    "rehearsal-is-whole": Explanation(
        what="A rehearsal covers the whole plan.",
        why="What the engine does not run yet is not in its peak.",
        confirm="Compare the names in the message with the plan.",
        fix="Nothing, if the rest is what you asked about.",
    ),
    "rehearsal-has-rank": Explanation(
        what="The ranks to rehearse are ranks of the plan.",
        why="Others hold nothing.",
        confirm="`threefold show` prints the grids.",
        fix="Numbers below cluster.gpus, or `stages`.",
    ),
    "rehearsal-ends": Explanation(
        what="A rehearsal ends within minutes.",
        why="It runs every operator of a step once, on tensors without memory. With tens of thousands of microbatches, "
        "or of pieces of a sequence, that takes hours.",
        confirm="The finding names the size and the limit.",
        fix="Rehearse a shorter sequence, a smaller batch, or more CP; `estimate` takes any size.",
    ),
    "rehearsal-is-alone": Explanation(
        what="A rehearsal runs in a process that is no rank of a real job.",
        why="It makes a process group of its own.",
        confirm="Look for torchrun's variables.",
        fix="Rehearse in another process.",
    ),
    "rehearsal-measures": Explanation(
        what="A measured rehearsal has a GPU, and memory enough on it.",
        why="Peaks are read from its allocator.",
        confirm="Count the GPUs torch shows.",
        fix="Rehearse with --device cpu.",
    ),
    "overlap-ab-runs-here": Explanation(
        what="The A/B of overlap runs on this machine's CPU.",
        why="It forks the ranks of the plan.",
        confirm="cluster.chip of the plan.",
        fix="Set cluster.chip to cpu, or compare two runs on the cluster.",
    ),
    "kernels-are-installed": Explanation(
        what="Kernels that a plan asks for by name are there and run on this GPU.",
        why="Others would give another speed than the one that was measured.",
        confirm="`threefold env` tries each.",
        fix="Install the package the message names, or delete the knob.",
    ),
    "here-has-torch": Explanation(
        what="The torch that is here is one the engine runs on, and the one the plan states.",
        why="Older ones lack kernels and fixes, newer ones were not tried.",
        confirm="`threefold env` prints the versions.",
        fix="Install another, or state in the plan what is here.",
    ),
    "here-has-chips": Explanation(
        what="The GPUs the plan is made for are here, as many and as large.",
        why="Fewer cannot hold its ranks, smaller ones its peak.",
        confirm="`threefold env` lists them.",
        fix="Run it where they are, or plan for these.",
    ),
    "here-has-packages": Explanation(
        what="Packages that the plan's knobs lean on are here and import.",
        why="A run that lacks one stops at its start.",
        confirm="`threefold env` lists them, with what each would give.",
        fix="Install the one the message names, or turn the knob back.",
    ),
    "here-at-length": Explanation(
        what="At 128K and beyond the kernels are here that such lengths were measured with.",
        why="Without them a step takes many times longer, or its scores do not fit.",
        confirm="`threefold env` tries each.",
        fix="Install what the message names.",
    ),
    "graph-records-backward": Explanation(
        what="Where a forward was recorded as a graph, its backward can be too.",
        why="The forward is gone when that turns out to be wrong, and the microbatch with it.",
        confirm="The message has what the device said.",
        fix="Take the scope out of knobs.graphs.",
    ),
    "context-fits-checkpoint": Explanation(
        what="A run that begins with trained weights has sequences that their positions reach, or says how they do.",
        why="Rotary positions beyond those of pretraining are new to the weights, and transformers and vLLM read "
        "max_position_embeddings and the rotary scaling from the exported config.json: both must say what was trained.",
        confirm="max_position_embeddings of config.json against job.seq_len.",
        fix="Shorten job.seq_len, or give --rope-scaling: yarn or linear stretch the positions, none leaves them.",
    ),
    "weights-are-used": Explanation(
        what="A run starts from the weights that lie beside its `hf:` configuration, or says that it does not.",
        why="A plan names a configuration only; training from random weights would look like fine-tuning.",
        confirm="`threefold train` says where the weights come from in its first line.",
        fix="`threefold finetune FOLDER --data FILE --out RUN`, or `threefold import-hf`.",
    ),
    "imported-weights-have-data": Explanation(
        what="A run that starts from imported weights names its data.",
        why="The default data is one token a byte, on which a checkpoint with a tokenizer unlearns what it knows.",
        confirm="Look for job.data in the plan.",
        fix="Give job.data, and job.tokenizer where the data is text.",
    ),
    "evaluation-ends": Explanation(
        what="An evaluation has an end.",
        why="Synthetic data goes on for ever.",
        confirm="Read what --data names.",
        fix="Give --sequences N, or data of your own.",
    ),
    "questions-readable": Explanation(
        what="A question of multiple choice has a text, choices, and which of them is right.",
        why="A line that is skipped would change the accuracy.",
        confirm="Look at the line that the message names.",
        fix='Write it as {"question": "...", "choices": ["...", "..."], "answer": 0}.',
    ),
}
