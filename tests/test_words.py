"""The words of the code: those of PyTorch, Megatron and the papers, in American spelling, one for each thing.

Folders that are not clean yet have a count in `LEFT`, which may only fall: a change that mends some lowers it.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import threefold

PACKAGE = Path(threefold.__file__).parent

# What is written, as a regular expression, and the word to write. Case does not matter.
WORDS = {
    r"(?<!left )(?<!leaves )(?<!nothing )(?<!queue )(?<!queue up )\bbehind\b": "after (left behind, queue behind)",
    r"\bbeside\b": "next to, with, in addition to, during",
    r"\b(goes|go|going|went) on\b(?! (the|a|an|each|every|one|its|their)\b)": "resumes, continues",
    r"picture(?!s-readable|s_sha256)(?<!num_picture)": "image",  # but for names that files have
    r"\bstranger(s|'s)?\b": "untrusted",
    r"\bfullest\b": "largest",
    r"\boutgr[oe]wn?\b": "exceeded",
    r"\bundressed\b|\bdress(ed|es|ing)?\b": "priced, formatted",
    r"\bour own engine\b": "threefold, the threefold engine",
    r"\bdocuments' order\b": "the recommended order",
    r"\b(rung|ladder)s?\b": "remedy, order",
    r"\bfor one in\b": "for rank in ranks: the noun",
}
BRITISH = (
    r"(behaviour|colour|favour|neighbour|centre|grey|learnt|labell|modell|travell|cancell(?!ation)|"
    r"(quant|normal|recogn|organ|initial|optim|serial|orthogonal|summar|special|general|minim|maxim|synchron|parallel|"
    r"util|categor|priorit|character|visual|final|emphas|anal)(is|ys)(e|ed|es|er|ers|ing|ation|ations|able)\b)"
)
PATTERNS = [(re.compile(old, re.IGNORECASE), new) for old, new in {**WORDS, BRITISH: "the American spelling"}.items()]
# Names that are no names: what a thing is, is its name.
NAMES = {"found", "said", "told"}
FIRST_WORDS = re.compile(r"(What|Whether|Where|Those|Of|How|Which|Why|Who)\b")

# Files that may use a word, with the reason.
ALLOWED = {
    "engine/data/images/scenes.py": "the text of drawn scenes is data that runs were trained on",
}

# Places that are left in folders that are not clean yet.
LEFT = {
    "api": 47,
    "cli": 183,
    "compare": 126,
    "cost": 427,
    "diagnose": 125,
    "dryrun": 62,
    "engine": 8,
    "engine/attention": 55,
    "engine/data": 1,
    "engine/dispatch": 16,
    "engine/generate": 1,
    "engine/graphs": 8,
    "engine/kernels": 78,
    "engine/layers": 12,
    "engine/models": 47,
    "engine/moe": 0,
    "engine/precision": 12,
    "engine/schedule": 21,
    "engine/shard": 1,
    "engine/weights": 30,
    "explore": 26,
    "interop": 85,
    "layout": 6,
    "lookup": 17,
    "machine": 32,
    "mcp": 7,
    "plan": 69,
    "profile": 165,
    "remedies": 32,
    "report": 208,
    "rules": 108,
    "search": 195,
    "spec": 92,
    "top": 9,
    "tune": 104,
}


def folder_of(file: Path) -> str:
    """The package of a file; in `engine` the folder, because they are large."""
    parts = file.relative_to(PACKAGE).parts
    if parts[0] == "engine":
        return f"engine/{parts[1]}" if len(parts) > 2 else "engine"
    return parts[0] if len(parts) > 1 else "top"


def problems(file: Path) -> Iterator[str]:
    """One line for each place that is not clean."""
    text = file.read_text(encoding="utf-8")
    for pattern, word in PATTERNS:
        for match in pattern.finditer(text):
            yield f"{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}, say: {word}"
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in NAMES:
            names.add((node.lineno, node.id))
        doc = ast.get_docstring(node) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) else None
        if match := FIRST_WORDS.match(doc or ""):
            yield f"{getattr(node, 'lineno', 1)}: a docstring begins with {match[0]!r}, not with a verb or a noun"
    yield from (f"{number}: {name!r} names no thing" for number, name in sorted(names))


FILES = [file for file in sorted(PACKAGE.rglob("*.py")) if str(file.relative_to(PACKAGE)) not in ALLOWED]
PROBLEMS = {str(file.relative_to(PACKAGE)): list(problems(file)) for file in FILES}
COUNTS = Counter({folder_of(file): 0 for file in FILES})
for file in FILES:
    COUNTS[folder_of(file)] += len(PROBLEMS[str(file.relative_to(PACKAGE))])


@pytest.mark.parametrize("folder", sorted(COUNTS))
def test_words(folder: str) -> None:
    lines = [
        f"{name}:{problem}"
        for name, found in PROBLEMS.items()
        if folder_of(PACKAGE / name) == folder
        for problem in found
    ]
    most = LEFT.get(folder, 0)
    assert COUNTS[folder] <= most, f"{COUNTS[folder]} places, and {most} may be left:\n" + "\n".join(lines[:40])
