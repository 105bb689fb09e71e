"""The commands in code blocks of README and docs: found, made concrete, and the files that they name."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from repository import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("skills/*/SKILL.md")),
]
TREE = ("recipes", "cards", "docs", "benchmarks", "data", "README.md")  # what commands name in the repository
# Words that stand for something of the reader's.
PLACEHOLDERS = {
    "PLAN": "plan.toml",
    "RUN": "runs/demo",
    "runs/RUN": "runs/demo",
    "CHECKPOINT": "hf",
    "path/to/checkpoint": "hf",
    "hf:path/to/config.json": "hf:hf/config.json",
    "PEFT_FOLDER": "peft",
    "DIR": "out",
    "SRC...": "notes.md",
    "bytes|PATH": "bytes",
    "256,512,...": "256,512",
    "NAME=VALUE": "gpu_mtbf_hours=20000",
}
TINY_PLAN = """model = "tiny-qwen3-moe"
cluster = { chip = "cpu", gpus = 2 }

[job]
seq_len = 64
global_batch = 4
micro_batch = 1
steps = 4

[layout]
ep = 2

[knobs]
precision = "fp32"

[run]
tensorboard = false
"""


@dataclass(frozen=True)
class Command:
    """A command of a page, as words behind `threefold`."""

    page: str
    words: tuple[str, ...]
    stdin: str = ""

    @property
    def verb(self) -> str:
        return self.words[0]

    def __str__(self) -> str:
        return f"{self.page}: threefold {shlex.join(self.words)}"


def commands_of(page: Path) -> Iterator[Command]:
    """Every `threefold ...` in indented or fenced code of a page."""
    name = str(page.relative_to(ROOT))
    for line in _code_lines(page.read_text(encoding="utf-8").replace("\\\n", " ")):
        match = re.match(r"(?:\$ )?threefold (.*)", line.strip())
        if match:
            yield _command(name, match[1])


def _code_lines(text: str) -> Iterator[str]:
    fence = ""
    for line in text.splitlines():
        if line.startswith("```"):
            fence = "" if fence else line
        elif fence in ("```", "```bash", "```sh", "```console") or (not fence and line.startswith("    ")):
            yield line


def _command(page: str, text: str) -> Command:
    """The words up to a pipe, a redirection or a remark, with the reader's things filled in."""
    head, _, stdin = re.split(r"\s(?:\|\|?|>>?)\s", text)[0].partition(" < ")
    behind = shlex.split(head.partition(" -- ")[0].replace(" ... ", " "), comments=True)
    words = [PLACEHOLDERS.get(word.strip("[]"), word) for word in _without_brackets(behind)]
    other = shlex.split(head.partition(" -- ")[2])
    return Command(page, (*words, *(["--", *other] if other else [])), stdin.split()[0] if stdin else "")


def _without_brackets(words: list[str]) -> Iterator[str]:
    """Optional parts of a synopsis, such as `[--price 2.5]`, are taken; a `...` behind them is not."""
    for word in words:
        bare = word if "=[" in word else word.strip("[]")
        if bare != "...":
            yield bare


def saved_files(page: Path) -> dict[str, str]:
    """Files that a page tells its reader to save: the fenced block behind "Save this as `NAME`"."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"[Ss]ave (?:this|it) as\s+`([^`]+)`[^`]*?```\w*\n(.*?)```", text, re.DOTALL)
    return dict(found)


def write_reader_files(folder: Path, page: Path) -> None:
    """What the commands of a page may name: parts of the repository, small plans, and text to train on."""
    for name in TREE:
        (folder / name).symlink_to(ROOT / name)
    smaller = TINY_PLAN.replace("seq_len = 64", "seq_len = 32")
    plans = {
        "plan.toml": TINY_PLAN,
        "a.toml": TINY_PLAN,
        "b.toml": TINY_PLAN + "gc_every = 7\n",
        "longer.toml": smaller,
    }
    chats = [{"messages": [{"role": r, "content": f"{r} {n}"} for r in ("user", "assistant")]} for n in range(24)]
    lines = "".join(f"{json.dumps(chat)}\n" for chat in chats)
    texts = {f"{name}.jsonl": lines for name in ("chats", "train", "val", "held-back", "prompts")}
    texts |= {
        "notes.md": "Some words. " * 400,
        "bench.py": "print('{\"step_seconds\": 0.1}')\n",
        "loads.json": "[1, 2]",
    }
    flags = ["--tensor-model-parallel-size 2", "--seq-length 4096", "--global-batch-size 64", "--micro-batch-size 1"]
    texts |= {"arguments.txt": "\n".join([*flags, "--expert-model-parallel-size 4"]), "command.sh": ""}
    texts |= {"run_config.yaml": "model:\n  tensor_model_parallel_size: 2\n"}
    (folder / "src").mkdir()
    (folder / "src" / "code.py").write_text("x = 1\n" * 200)
    for name, text in {**plans, **texts, **saved_files(page)}.items():
        (folder / name).write_text(text, encoding="utf-8")
