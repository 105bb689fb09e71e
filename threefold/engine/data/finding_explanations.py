"""Explanations of findings about tokenizers, chat templates and data formats.

`rules/base.py` reads them beside those of `engine/finding_explanations.py`. This module imports no torch.
"""

from threefold.findings import Explanation

EXPLANATIONS = {
    "data-fits-tokenizer": Explanation(
        what="All data of a run was made with the tokenizer of the run, job.tokenizer.",
        why="The same number is another word in another tokenizer, and the model would learn noise.",
        confirm="A shard has the SHA-256 of its tokenizer.json in its header, and the message names both.",
        fix="Tokenize the text with job.tokenizer, or name the tokenizer that the shards were made with.",
    ),
    "megatron-readable": Explanation(
        what="Megatron's PREFIX.bin and PREFIX.idx belong together, and tokens are in the model's vocabulary.",
        why="A wrong index or dtype reads other tokens without a word.",
        confirm="Compare the sizes of the two files; docs/reference/data-format.md has the format.",
        fix="Copy both files again, or make them again.",
    ),
    "mask-has-a-place": Explanation(
        what="Conversations are written to a token shard.",
        why="Megatron's format has no loss mask: the questions would be learned too.",
        confirm="The sources have messages, or prompts with completions.",
        fix="Write a shard (--out FILE.tok).",
    ),
    "records-skipped": Explanation(
        what="All records of the data can be used.",
        why="A few broken records in many are no reason to stop, but they are counted and named.",
        confirm="Look at the lines that the message names.",
        fix="Correct them, or set job.max_bad_records to 0 to be stopped by any.",
        severity="warning",
    ),
    "chats-split-by-turn": Explanation(
        what="A conversation is one sample, in which all its answers are learned.",
        why="Some chat templates render a turn otherwise when others follow: they drop its reasoning, or end the last "
        "turn with another token. No single text then has each answer as the model is to give it, so that every answer "
        "becomes a sample of its own, with the conversation before it rendered as it will be at inference.",
        confirm="Render a conversation with and without its last turns.",
        fix="Nothing is to be done; a template with {% generation %} keeps conversations whole.",
        severity="warning",
    ),
    "chat-template-compiles": Explanation(
        what="The chat template of a tokenizer is a Jinja template.",
        why="Conversations are rendered with it, as transformers does.",
        confirm="Open chat_template.jinja beside tokenizer.json, or chat_template in tokenizer_config.json.",
        fix="Correct it, or delete it: conversations are then written in ChatML.",
    ),
    "jinja-installed": Explanation(
        what="jinja2 is there when a tokenizer has a chat template.",
        why="It renders the template, in a sandbox.",
        confirm="Import jinja2.",
        fix="pip install 'threefold[train]'.",
    ),
    "pyarrow-installed": Explanation(
        what="pyarrow is there when data is Parquet, Arrow or a saved dataset.",
        why="It reads these files.",
        confirm="Import pyarrow.",
        fix="pip install 'threefold[parquet]', or convert the data to JSONL.",
    ),
    "pictures-readable": Explanation(
        what="Tar shards and JSONL of pictures can be read, and at least one of their records can be used.",
        why="Single records and pictures that are damaged are skipped, counted and named; a damaged shard would change "
        "what is learned without a word.",
        confirm="The message names the file, or the first record and its reason.",
        fix="Copy the shard again, or correct the records; docs/reference/image-data.md has the formats.",
    ),
    "data-fits-model": Explanation(
        what="Data with pictures is for a model that sees.",
        why="A text model has no encoder for them.",
        confirm="`threefold models` shows which models see.",
        fix="Train a vision-language model, or give text.",
    ),
    "image-workers-run": Explanation(
        what="The processes that decode pictures can run.",
        why="One that a damaged picture ends is replaced, and the picture is skipped. Where several end in a row, "
        "training would go on without any pictures.",
        confirm="The terminal, or logs/rank-N.log of the run, has what the processes said; look at the memory as well.",
        fix="Remove the cause, or decode in the loader's thread: run.image_workers = 0.",
    ),
    "pillow-installed": Explanation(
        what="Pillow is there when the data has pictures.",
        why="It decodes and resizes them.",
        confirm="Import PIL.",
        fix="pip install 'threefold[train]'.",
    ),
}
