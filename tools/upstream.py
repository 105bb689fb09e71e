"""The watch: which of our rules, conflicts and exported settings a new release of Megatron moves.

    python tests/megatron/get_wheels.py FOLDER 0.7.0 0.20.0
    python tools/upstream.py FOLDER [OLD NEW]

`FOLDER` holds wheels, those of a release in one folder: without names, those of the newest release that we support are
compared with the newest in the folder. For each rule and conflict of settings that follows a statement of Megatron it
says whether the statement is gone, is new, or asks for something else than before; a line that only moved is counted.
For each setting that an export writes or such a statement reads it says whether it is gone or has another default.
Families that came or went, and refusals in the same files that no rule follows, end the list. Nothing of the wheels is
imported. `make try-megatron` goes on where this ends: it lets both releases judge plans.
"""

import ast
import sys
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from read_megatron import architectures, followed
from read_settings import settings
from read_wheels import PAIRS, Sources

from threefold.interop.megatron.field_names import IMPLIED, PLAIN, READ_ALSO
from threefold.spec.hf import HF_CLASSES
from threefold.spec.megatron import version

EXPORTED = {
    path.rpartition(".")[2] for path in (*(row.path for row in PLAIN), *IMPLIED, *READ_ALSO, *READ_ALSO.values())
}
Followed = dict[str, tuple[str, str]]  # for each rule its file under `megatron/`, and words of its message there


@dataclass
class Statement:
    """A refusal or a warning: its line, what it asks for, and the attributes of the configuration that it reads."""

    line: int
    condition: str
    names: set[str] = field(default_factory=set)


class Release:
    """The pair of wheels of one release."""

    def __init__(self, name: str, wheels: list[Path]) -> None:
        self.name, self.sources = name, Sources(wheels)
        self.archives = [zipfile.ZipFile(path) for path in wheels]

    def text(self, file: str) -> str:
        path = f"megatron/{file}"
        archive = next((one for one in self.archives if path in one.namelist()), None)
        return archive.read(path).decode() if archive else ""

    def statement(self, file: str, words: str) -> Statement | None:
        """The statement that holds the words, where one does."""
        text = self.text(file)
        line = next((number for number, line in enumerate(text.splitlines(), 1) if words in line), None)
        return None if line is None else _statement_at(ast.parse(text), line)

    def refusals(self, file: str) -> dict[str, int]:
        """Messages of every assertion and error of a file, with their lines."""
        found = {}
        for node in ast.walk(ast.parse(self.text(file))):
            said = node.msg if isinstance(node, ast.Assert) else node.exc if isinstance(node, ast.Raise) else None
            words = " ".join(_texts(said)) if said is not None else ""
            if words:
                found[" ".join(words.split())] = node.lineno
        return found

    def defaults(self) -> dict[tuple[str, str], str]:
        """By class and name, for every field of a configuration."""
        return {
            (holder, name): default
            for name, (holder, _, _, default) in settings(self.sources, "megatron")
            if holder != "argument"
        }


def _texts(node: ast.AST) -> Iterator[str]:
    yield from (one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str))


def _statement_at(tree: ast.Module, line: int) -> Statement:
    """The conditions on the way to a line, and what an assertion there asks for."""
    conditions, names, node = list[str](), set[str](), tree
    while True:
        inside = [one for one in ast.iter_child_nodes(node) if getattr(one, "lineno", line + 1) <= line]
        inside = [one for one in inside if line <= (getattr(one, "end_lineno", None) or 0)]
        if not inside or not isinstance(inside[-1], ast.stmt):
            return Statement(line, " and ".join(conditions), names)
        node = inside[-1]  # type: ignore[assignment]
        test = getattr(node, "test", None)
        if isinstance(node, ast.If | ast.Assert) and test is not None:
            is_else = isinstance(node, ast.If) and node.orelse and node.orelse[0].lineno <= line
            form = "not ({})" if is_else else "assert {}" if isinstance(node, ast.Assert) else "({})"
            conditions.append(form.format(ast.unparse(test)))
            names |= {one.attr for one in ast.walk(test) if isinstance(one, ast.Attribute)}


def moved_statements(old: Release, new: Release, follow: Followed) -> Iterator[str]:
    """What became of each statement that a rule follows. Lines that only moved are counted."""
    shifted = 0
    for name, (file, words) in sorted(follow.items()):
        before, after = old.statement(file, words), new.statement(file, words)
        if before is None and after is None:
            continue  # of an older release
        if after is None:
            yield f"{name}: gone from {file} ({old.name} has it at line {before.line if before else 0})"
        elif before is None:
            yield f"{name}: new in {new.name}, {file}:{after.line}"
        elif before.condition != after.condition:
            conditions = f"\n    was {before.condition}\n    is  {after.condition}"
            yield f"{name}: {file}:{after.line} asks for something else{conditions}"
        else:
            shifted += before.line != after.line
    if shifted:
        yield f"{shifted} statements only moved to another line: tools/read_megatron.py writes them"


def moved_settings(old: Release, new: Release, follow: Followed) -> Iterator[str]:
    """Settings that are gone or have another default, with the rules that read them."""
    readers = defaultdict(list)
    for name, (file, words) in sorted(follow.items()):
        statement = new.statement(file, words) or old.statement(file, words)
        for setting in sorted(statement.names) if statement else ():
            readers[setting].append(name)
    before, after = old.defaults(), new.defaults()
    remain = {name for _, name in after}
    for (holder, name), default in sorted(before.items()):
        who = [*readers.get(name, ()), *(["an export writes it"] if name in EXPORTED else [])]
        if not who:
            continue
        if name not in remain:
            yield f"{holder}.{name}: gone ({', '.join(who)})"
        elif (now := after.get((holder, name), default)) != default:
            yield f"{holder}.{name}: default {default} is now {now} ({', '.join(who)})"


def unfollowed(old: Release, new: Release, follow: Followed) -> Iterator[str]:
    """Refusals that are new, in files that several rules follow."""
    for file in sorted(file for file, count in Counter(file for file, _ in follow.values()).items() if count > 1):
        known = old.refusals(file) if old.text(file) else {}
        for words, line in new.refusals(file).items() if new.text(file) else ():
            ours = any(
                place == file and (words in said or said.strip("f\"'") in words) for place, said in follow.values()
            )
            if words not in known and not ours:
                yield f"{file}:{line}: {words[:160]}"


def watch(old: Release, new: Release, follow: Followed) -> Iterator[str]:
    for title, lines in (
        ("Rules and conflicts whose statement moved", moved_statements(old, new, follow)),
        ("Settings that moved", moved_settings(old, new, follow)),
        ("Families", _families(old, new)),
        ("New refusals that no rule follows", unfollowed(old, new, follow)),
    ):
        found = list(lines)
        yield f"{title}: {'' if found else 'none'}".rstrip()
        yield from (f"  {line}" for line in found)


def _families(old: Release, new: Release) -> Iterator[str]:
    names = {name: family.removesuffix("_text") for family, name in HF_CLASSES.items()}
    before, after = (set(architectures(one.sources)) for one in (old, new))
    yield from (f"no longer {names.get(name, name)}" for name in sorted(before - after))
    yield from (f"trains {names[name]}" for name in sorted(after - before) if name in names)


def find_releases(folder: Path) -> dict[str, list[Path]]:
    """Oldest first: wheels of Bridge, each with that of Megatron Core next to it."""
    found = {}
    for bridge in folder.rglob("megatron_bridge-*.whl"):
        cores = sorted(bridge.parent.glob("megatron_core-*.whl"))
        known = PAIRS.get(bridge.name.split("-")[1])
        named = [core for core in cores if known and core.name.startswith(f"megatron_core-{known[0]}-")]
        if cores:
            found[bridge.name.split("-")[1]] = [(named or cores)[-1], bridge]
    return dict(sorted(found.items(), key=lambda item: version(item[0])))


def main() -> None:
    if len(sys.argv) not in (2, 4):
        sys.exit("python tools/upstream.py FOLDER [OLD NEW]")
    folder, *names = sys.argv[1:]
    found = find_releases(Path(folder))
    supported = [name for name in found if name in PAIRS]
    pair = names or [*supported[-1:], *list(found)[-1:]]
    if len(pair) != 2 or pair[0] == pair[1] or not set(pair) <= set(found):
        sys.exit(f"two releases are compared, and {folder} has {', '.join(found) or 'none'}")
    old, new = pair
    print(f"Megatron Bridge {old} -> {new}")
    for line in watch(*(Release(name, found[name]) for name in (old, new)), followed()):
        print(line)


if __name__ == "__main__":
    main()
