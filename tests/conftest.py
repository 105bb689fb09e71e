"""What tests share. Hypothesis runs the same examples every time, so that a red test stays red.

To look further: pytest --hypothesis-profile=explore --timeout=0
"""

import gc
import inspect
import re
import signal
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

# No deadline: on a busy machine the first example alone can be slow.
settings.register_profile("repeat", deadline=None, derandomize=True, max_examples=100)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile("repeat")

# A suite that a shell started in the background inherits an ignored SIGINT; tests of Ctrl-C need Python's own handler.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The planner installs without these packages. A test file that needs one of them says so by its imports.
_OPTIONAL = {
    "torch": r"^(import torch|from torch|from threefold\.(engine|dryrun))",
    "triton": r"^(import triton|from triton|from threefold\.engine\.kernels\.(elementwise|fp8|loss_and_optimizer))",
    "transformers": r"^import transformers",
    "safetensors": r"^(import safetensors|from safetensors|from threefold\.engine\.(weights|models)\b)",
}
_MISSING = [re.compile(pattern, re.MULTILINE) for name, pattern in _OPTIONAL.items() if find_spec(name) is None]
_SUPPORT = {path.stem: path for path in (Path(__file__).parent / "support").glob("*.py")}


def _needs_missing(file: Path) -> bool:
    """Whether a file imports a package that is not installed, by itself or through a module of tests/support."""
    source = file.read_text(encoding="utf-8")
    if any(pattern.search(source) for pattern in _MISSING):
        return True
    names = re.findall(r"^(?:from|import) (\w+)", source, flags=re.MULTILINE)
    return any(_needs_missing(_SUPPORT[name]) for name in names if name in _SUPPORT)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out test files whose packages are not installed: then only the planner is tested."""
    return True if _MISSING and collection_path.suffix == ".py" and _needs_missing(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is a GPU, a process that has run a backward can fork no ranks that will: tests that fork go first.

    A rehearsal runs a backward in this process, so those that fork and rehearse come after those that only fork.
    """
    try:
        import torch
    except ImportError:
        return
    if torch.cuda.is_available():
        items.sort(key=lambda item: (not _uses(item, _FORKS), _uses(item, _REHEARSES)))


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end, so that the garbage collector need not look at them: a collection would
    take up to half a second, and many tests ask for one."""
    gc.collect()
    gc.freeze()


_FORKS = re.compile(r"\b(run_ranks|compare_with_one_rank)\(")
_REHEARSES = re.compile(r"\brehearse\w*\(")


def _uses(item: pytest.Item, pattern: re.Pattern[str]) -> bool:
    """Whether a test calls such a function, by itself or through a function of its file."""
    if not isinstance(item, pytest.Function):
        return False
    functions = {name: value for name, value in vars(item.module).items() if inspect.isfunction(value)}
    known, new = {item.function}, {item.function}
    while new:
        sources = [inspect.getsource(function) for function in new]
        if any(pattern.search(source) for source in sources):
            return True
        called = {functions[name] for name in functions for source in sources if f"{name}(" in source}
        known, new = known | called, called - known
    return False


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was measured on this machine does not change what tests see, nor do tests change what was measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread of torch and one seed: the same sums in the same order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def poisoned(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever is allocated begins as nan, the largest number where it is whole: a value that nobody wrote shows."""
    import torch

    home = torch.utils.deterministic
    filled = home.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # What has no such algorithm runs as ever, and need not say so.
    request.node.add_marker(pytest.mark.filterwarnings("ignore:.*deterministic"))
    home.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    home.fill_uninitialized_memory = filled
