"""Where the repository lies: recipes, published runs and benchmarks that tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
