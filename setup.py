"""Copies pages, recipes, cards, skills and published runs into the wheel, where `find` and `skills` read them."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SEARCHED = (
    ("docs", "*.md"),
    ("recipes", "*.toml"),
    ("cards", "*.toml"),
    ("skills", "*.md"),
    ("data", "published_runs.json"),
)


class BuildWithPages(build_py):
    def run(self) -> None:
        super().run()
        root = Path(__file__).parent
        for folder, pattern in SEARCHED:
            for path in (root / folder).rglob(pattern):
                target = Path(self.build_lib) / "threefold" / "shipped" / path.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)


setup(cmdclass={"build_py": BuildWithPages})
