"""`threefold skills`: list the skills for assistants that come with Threefold, or copy them to a folder."""

import argparse
import shutil
import sys
from pathlib import Path

from threefold.cli.command_line.out import print_json
from threefold.lookup.entries import shipped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--install", type=Path, metavar="DIR", help="copy them here, each into a folder of its own")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    skills = [_described(path) for path in sorted(shipped("skills").glob("*/SKILL.md"))]
    if args.install and (problem := _copied(args.install)):
        print(f"threefold skills: {problem}", file=sys.stderr)
        return 1
    if args.json:
        print_json(skills)
        return 0
    for skill in skills:
        print(f"{skill['name']}\n    {skill['description']}")
    print(f"copied to {args.install}" if args.install else "`threefold skills --install DIR` copies them")
    return 0


def _described(path: Path) -> dict[str, str]:
    """Name and description of the page's first lines, between two rules."""
    head = path.read_text(encoding="utf-8").split("---", 2)[1]
    lines = dict(line.split(": ", 1) for line in head.strip().splitlines())
    return {"name": lines["name"], "description": lines["description"], "folder": path.parent.name}


def _copied(folder: Path) -> str:
    """Why the skills could not be copied, or nothing. A folder that somebody changed is not overwritten."""
    sources = sorted(path.parent for path in shipped("skills").glob("*/SKILL.md"))
    for source in sources:
        target = folder / source.name
        if target.exists() and _texts(target) != _texts(source):
            return f"{target} is there already and differs: remove it, or give another folder"
    try:
        for source in sources:
            shutil.copytree(source, folder / source.name, dirs_exist_ok=True)
    except OSError as error:
        return f"cannot write {error.filename}: {error.strerror}"
    return ""


def _texts(folder: Path) -> dict[str, bytes]:
    return (
        {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()} if folder.is_dir() else {}
    )
