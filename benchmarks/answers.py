"""How many expected facts of tests/lookup/questions.toml three mechanical readers find: `python benchmarks/answers.py`.

The first runs the commands of the test. The second types the question as it is and reads the best entries in full. The
third types the question, then opens the best three entries as `find` says. None of them understands what it reads.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "lookup"))
sys.path.insert(0, str(ROOT / "tests" / "support"))

from test_questions import QUESTIONS, has, printed  # noqa: E402

from threefold.lookup.search import find  # noqa: E402


def as_written(question: dict[str, Any]) -> list[str]:
    return list(question["commands"])


def words_of(question: dict[str, Any]) -> str:
    return " ".join(re.findall(r"[\w.+/-]*\w", question["ask"]))


def in_full(question: dict[str, Any]) -> list[str]:
    return [f"find --most 8 -- {words_of(question)}", f"find --most 3 --full -- {words_of(question)}"]


def opened(question: dict[str, Any]) -> list[str]:
    commands = [f"find --most 8 -- {words_of(question)}"]
    for entry in find(words_of(question), most=3):
        if entry.kind in ("rule", "death"):
            commands.append(f"check --explain {entry.name}")
        elif entry.kind == "name":
            commands.append(f"find --kind name -- {entry.name}")
        else:
            commands.append(f"find --kind {entry.kind} --most 1 --full -- {entry.name}")
    return commands


if __name__ == "__main__":
    facts = sum(len(question["facts"]) for question in QUESTIONS)
    for reader in (as_written, in_full, opened):
        held, commands, missing = 0, 0, []
        for question in QUESTIONS:
            texts = [printed(line) for line in reader(question)]
            commands += len(texts)
            lacking = [fact[0] for fact in question["facts"] if not any(has(text, fact[1:]) for text in texts)]
            held += len(question["facts"]) - len(lacking)
            missing += [question["ask"]] if lacking else []
        result = {"reader": reader.__name__, "facts": facts, "held": held, "share": round(held / facts, 3)}
        result |= {"commands_a_question": round(commands / len(QUESTIONS), 2), "questions_with_gaps": len(missing)}
        print(json.dumps(result))
