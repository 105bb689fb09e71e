"""What the engine's findings mean, for `threefold check --explain`: what, why, how to confirm, how to fix. No torch."""

EXPLAIN = {
    "shard-readable": "A token shard is whole and of a known version.|A damaged shard would train on noise."
    "|Open it again after checking size and disk; docs/data.md has the format.|Make it anew with `threefold tokenize`.",
    "text-readable": "Text to be tokenized can be read.|A file that is skipped silently changes the data."
    "|Open the file the message names.|Correct the path or the encoding.",
    "chat-readable": "A chat has messages with a role and text.|Loss masks follow the roles."
    "|Look at the line the message names; docs/data.md has the form.|Correct the line.",
    "data-empty": "There is data to train on.|A run without samples would wait for ever."
    "|Count the documents of the source.|More data, or a shorter job.seq_len.",
    "data-weights": "All entries of a mixture have a weight above 0, or none has.|A share of nothing means nothing."
    "|Read job.data.|Give all a weight (path:0.3), or none: then sizes decide.",
    "data-fits-vocab": "Tokens of the data are in the model's vocabulary.|The model has no row for another one."
    "|Compare the shard's vocabulary with model.vocab.|Tokenize with the model's own tokenizer.",
    "data-one-tokenizer": "Shards of a mixture have one tokenizer.|A number would be another word in each of them."
    "|The message names them.|Tokenize all of them with one.",
    "data-fits-task": "Fine-tuning has data of conversations.|The loss is on answers, which a mask tells apart."
    "|Look how the shard was made.|Tokenize JSONL with messages, or pretrain on it.",
    "data-unchanged": "A resumed run reads the data it began with.|Another mixture would continue another run."
    "|Compare job.data with the run's plan.|Give the data as it was, or start a new run.",
    "tokenizer-readable": "The tokenizer file can be read.|Tokens mean nothing without it."
    "|Open it with the tokenizers library.|Give a tokenizer.json, or use bytes.",
    "tokenizers-installed": "The tokenizers package is there when a tokenizer file is used.|It reads the file."
    "|Import tokenizers.|pip install 'threefold[train]', or use bytes.",
    "file-writable": "Files can be written where they are asked for.|A half-written shard is removed again."
    "|Check space and rights of the folder.|Free space, or choose another path.",
    "hf-weights": "A Hugging Face checkpoint has every weight of the model in the right shape."
    "|A missing tensor would stay random.|Compare the index with the names in the message.|Complete the checkpoint.",
    "convertible": "A checkpoint can be imported or exported here, and what was imported is the plan's model."
    "|Nothing is overwritten; a weight that is missing would stay random.|Look into the folder the message names."
    "|Choose another folder, train first, import again, or train the model that was imported.",
    "checkpoint-whole": "A checkpoint has every file with the checksum it was written with."
    "|A flipped bit in a weight trains on unnoticed.|Compare the file with manifest.json."
    "|Use the checkpoint before it; the engine does so by itself.",
    "checkpoint-writable": "Checkpoints can be written.|A run that cannot save loses what it learns."
    "|Check the space of the run's folder.|Free space; earlier checkpoints are untouched.",
    "run-is-this-plan": "A run folder holds one plan.|Going on with another plan would mix two runs."
    "|Compare plan.toml in the folder.|Another --run folder; job.steps and run.* may change.",
    "run-is-alone": "A folder has one run at a time.|Two would write over each other's checkpoints and metrics."
    "|The message names the process and machine that keep run.lock locked."
    "|Wait for its end, or choose another --run folder.",
    "run-writable": "The run's folder can be written.|Metrics and checkpoints go there."
    "|Check rights and space.|Choose another --run folder.",
    "run-has-checkpoint": "A run that is sampled or exported has a checkpoint.|Weights come from it."
    "|Look into checkpoints/ of the run.|Train it first.",
    "prompt-fits-vocab": "Tokens of a prompt are in the model's vocabulary.|The model has no row for another one."
    "|Compare the tokenizer's vocabulary with model.vocab of the run's plan."
    "|Give the tokenizer that the run's data was made with.",
    "loss-is-finite": "Loss and gradients are finite.|A step from a NaN destroys the weights, so it is skipped;"
    " many of them mean something is wrong.|Look at loss and grad_norm in metrics.jsonl.|Lower job.lr, check the data.",
    "engine-family": "The engine has the model's family.|A guessed architecture would train something else."
    "|`threefold models` shows the family.|Use a family the message names.",
    "cores-exist": "The cores of run.cores are there.|A process pinned to no core does not run."
    "|Count the cores of the machine.|Write cores as 0-7,16.",
    "ranks-meet": "Ranks know who they are and where to meet, from torchrun's or Slurm's variables."
    "|A rank that waits at the wrong place waits for ever.|Print the environment of the rank the message names."
    "|Start ranks with `threefold train --nproc`, torchrun, or a script of `threefold launch`.",
    "ranks-match-plan": "The ranks that were started can hold the plan's layout and share its batch."
    "|A layout is cut for a number of ranks; more or fewer in whole multiples only change data parallelism."
    "|`threefold show` prints the grids; divide the ranks by PP x lcm(TP x CP, EP x ETP)."
    "|Start as many ranks as the message names, or change the plan.",
    "ranks-start-here": "A run is started where its GPUs are.|Two ranks on one GPU share its memory and deadlock NCCL."
    "|Count the GPUs the machine shows.|`threefold launch --slurm` or `--torchrun` start it on the cluster.",
    "ranks-survive": "Ranks that fail are started again, a few times.|A fault that keeps coming back is no accident."
    "|Read the tail shown above it, and logs/rank-N.log in the run's folder."
    "|Remove the cause and start again: the run goes on from its newest checkpoint; --max-restarts allows more.",
    "collective-arrives": "Every rank of a group comes to each of its collectives within the limit."
    "|One missing rank lets all others wait, silently.|The message says which ranks did not come, and where they are."
    "|Look at those ranks: their machine, their data, their log. A longer limit if they were only slow.",
    "phase-progresses": "A phase with a limit makes progress within it.|A rank that stands still stops all others."
    "|The message names the line it stands at and ranks behind.|Look there, or give the phase a longer limit.",
    "script-options": "Options of a batch script are words its parser takes, and fit the plan."
    "|Slurm reads #SBATCH lines before any shell could quote them.|Compare with `man sbatch`."
    "|Correct the option the message names.",
    "dispatcher-available": "The dispatcher of the plan can be used here.|A silent fallback would keep the speed of"
    " another one.|Import deep_ep, and compare its classes and the chip with the message."
    "|Install the package the message names, or set knobs.dispatcher to alltoall.",
    "checkpoint-fits": "A checkpoint has every tensor this plan needs, in its shape.|Weights that are not found would"
    " stay random.|Compare the names in the message with tensors in manifest.json."
    "|Go on with the plan the run was started with, or start a new run.",
    "layout-computes-the-same": "A layout computes what one rank computes.|Otherwise it trains another model."
    "|`threefold verify PLAN --scale-down` again, with a layout of fewer axes."
    "|Report it with the plan; meanwhile use a layout that agrees.",
    "verify-fits-here": "The ranks of a verification run on this machine.|They are forked, and compute in fp64."
    "|Count the ranks of the plan.|Add --scale-down.",
    "rehearsal-runs": "The engine gets through a step of the plan.|What fails in a rehearsal fails on the cluster."
    "|The message says which rank, module and phase, and what stopped there; `threefold dry-run --ranks N` repeats it."
    "|Change what the place names; where the engine itself is at fault, report it with the plan.",
    "rehearsal-fits-memory": "The rehearsed peak of every stage fits the chip."
    "|A rehearsal allocates what the run would, so that a peak over the memory ends the run in its first step."
    "|`threefold dry-run` prints the peak by term and its largest tensors.|What the message says of the largest term.",
    "rehearsal-is-whole": "A rehearsal covers the whole plan.|What the engine does not run yet is not in its peak."
    "|Compare the names in the message with the plan.|Nothing, if the rest is what you asked about.",
    "rehearsal-has-rank": "The ranks to rehearse are ranks of the plan.|Others hold nothing."
    "|`threefold show` prints the grids.|Numbers below cluster.gpus, or `stages`.",
    "rehearsal-is-alone": "A rehearsal runs in a process that is no rank of a real job."
    "|It makes a process group of its own.|Look for torchrun's variables.|Rehearse in another process.",
    "rehearsal-measures": "A measured rehearsal has a GPU, and memory enough on it."
    "|Peaks are read from its allocator.|Count the GPUs torch shows.|Rehearse with --device cpu.",
    "overlap-ab-runs-here": "The A/B of overlap runs on this machine's CPU.|It forks the ranks of the plan."
    "|cluster.chip of the plan.|Set cluster.chip to cpu, or compare two runs on the cluster.",
    "kernels-are-installed": "Kernels that a plan asks for by name are there and run on this GPU."
    "|Others would give another speed than the one that was measured.|`threefold env` tries each."
    "|Install the package the message names, or delete knobs.expert_kernels.",
    "here-has-torch": "The torch that is here is one the engine runs on, and the one the plan states."
    "|Older ones lack kernels and fixes, newer ones were not tried.|`threefold env` prints the versions."
    "|Install another, or state in the plan what is here.",
    "here-has-chips": "The GPUs the plan is made for are here, as many and as large."
    "|Fewer cannot hold its ranks, smaller ones its peak.|`threefold env` lists them."
    "|Run it where they are, or plan for these.",
    "here-has-packages": "Packages that the plan's knobs lean on are here and import."
    "|A run that lacks one stops at its start.|`threefold env` lists them, with what each would give."
    "|Install the one the message names, or turn the knob back.",
    "here-at-length": "At 128K and beyond the kernels are here that such lengths were measured with."
    "|Without them a step takes many times longer, or its scores do not fit.|`threefold env` tries each."
    "|Install what the message names.",
    "graph-records-backward": "Where a forward was recorded as a graph, its backward can be too."
    "|The forward is gone when that turns out to be wrong, and the microbatch with it."
    "|The message has what the device said.|Take the scope out of knobs.graphs.",
}
