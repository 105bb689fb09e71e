"""What every reader takes and returns. The readers and `diagnosis.py` share it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from threefold.diagnose.files import Kind
from threefold.diagnose.redact import Redactor
from threefold.findings import Finding
from threefold.plan.plan import Plan


@dataclass(frozen=True)
class Context:
    """What readers know besides their files."""

    plan: Plan | None = None  # the plan that ran, where the user names it or a run's folder holds it
    plan_source: str = "--plan"
    judges_plans: bool = True  # whether rules and the estimate judge the plan behind a printed configuration
    redact: Redactor = field(default_factory=Redactor)
    say: Callable[[str], None] = lambda text: None  # shows progress


class Part(Protocol):
    """What the files of one kind say."""

    @property
    def kind(self) -> Kind: ...

    @property
    def findings(self) -> Sequence[Finding]: ...

    @property
    def lines(self) -> Sequence[str]: ...  # redacted, and without line ends

    def to_json(self) -> dict[str, Any]: ...


Reader = Callable[[Sequence[Path], Context], Part]


def unreadable(path: Path, error: Exception) -> Finding:
    """The finding about a file that nothing can be said about."""
    problem = str(getattr(error, "strerror", None) or error)
    advice = "give logs, flight recorder dumps, memory snapshots, traces or the folder of a run"
    return Finding(rule="file-readable", at=path.name, problem=problem, advice=advice)
