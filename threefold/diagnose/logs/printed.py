"""What a job printed about itself: its configuration, versions and memory."""

import re
from dataclasses import dataclass, field

from threefold.interop.megatron.bridge_summary import END as SUMMARY_END
from threefold.interop.megatron.bridge_summary import HEAD as SUMMARY

_MOST_LINES = 20_000
_MOST_CHARS = 2**21
_TABLE = "--- arguments ---"
_TABLE_END = "--- end of arguments ---"
_TITAN = re.compile(r"Running with (?:configs|args): (\{.*)")
# Lines that are in no configuration: a block that is open is over, or other ranks write into it.
_NO_CONFIGURATION = re.compile(
    r"Traceback \(most recent|\biteration\s+\d+/|\bstep:\s*\d+|^\s{0,8}[\w.]*(?:Error|Exception)\b|\[[EF]\d{3,4} "
)
_BEGINS = (_TABLE.encode(), SUMMARY.encode(), b"Running with configs: {", b"Running with args: {")
_SIGNS = ("-----", "Configuration Summary", "Running with")
_VERSIONS = (
    (r"NCCL version ([\d.]+)", "nccl"),
    (r"PyTorch (?:V|v)ersion:? ?([\d][\w.+]*)", "torch"),
    (r"\btorch[ =:]+v?(\d+\.\d+[\w.+]*)", "torch"),
    (r"[Tt]ransformer[ _-]?[Ee]ngine(?: version)?[ =:]+v?(\d+\.\d+[\w.+]*)", "transformer_engine"),
    (r"CUDA (?:V|v)ersion:? ?([\d.]+)", "cuda"),
    (r"[Dd]river [Vv]ersion:? ?([\d.]+)", "driver"),
    (r"megatron[-_ ]core(?: version)?[ =:]+v?(\d+\.\d+[\w.+]*)", "megatron_core"),
)
# In lower case; one of them is in each line that `note` or `begins` takes something from.
WORDS = (
    "version", ") memory (", "cuda capacity", "device mesh", "peak flops", "- arguments -", "configuration summary",
    "running with configs", "running with args", "checkpoint", "export ", "declare -x",
)  # fmt: skip
VERSION = r"torch[ =:]+v?\d|transformer[ _-]?engine[ =:]+v?\d|megatron[-_ ]core[ =:]+v?\d"  # lines without that word
_CAPACITY = re.compile(r"CUDA capacity: (.+?) with (\d{1,9}(?:\.\d+)?)GiB memory")
_MESH = re.compile(r"Building device mesh with parallelism: (.+)")
_MEMORY = re.compile(r"\[Rank (\d{1,6})\] \((?:after )?(\d+) iterations?\) memory \((MB|GB)\)(.*)")
_MEMORY_FIELD = re.compile(r"\|\s*([\w -]+?):\s*(\d{1,15}(?:\.\d+)?)")
_EXPORT = re.compile(r"(?:^|\s)(?:export|declare -x) ([A-Z][A-Z0-9_]{2,60})=[\"']?([^\"'\s]{1,120})")
_CHECKPOINT = re.compile(r"[Ss]uccessfully (saved|loaded) checkpoint|[Ss]aving (?:a )?(?:the )?(?:full )?(checkpoint)")
_MOST_VARIABLES = 200
_PEAK_TFLOPS = re.compile(r"Peak FLOPS used for computing MFU: (\d{1,9}(?:\.\d+)?(?:e\+?\d{1,2})?)")


@dataclass
class Printed:
    """Text blocks of configuration, and facts of single lines."""

    arguments: str = ""  # Megatron-LM's table
    summary: str = ""  # Bridge's configuration
    titan: str = ""  # torchtitan's, JSON or a dict as Python prints it
    mesh: dict[str, int] = field(default_factory=dict)  # torchtitan's degrees
    versions: dict[str, str] = field(default_factory=dict)
    device: str = ""
    device_gib: float | None = None
    peak_flops: float | None = None
    memory_bytes: dict[int, dict[str, float]] = field(default_factory=dict)  # by rank: what its memory line said
    environment: dict[str, str] = field(default_factory=dict)  # variables that a launcher's shell showed
    checkpoints: set[str] = field(default_factory=set)  # "saved", "loaded"
    num_starts: int = 0  # configurations printed: one for each start of the job
    _kind: str = ""
    _lines: list[str] = field(default_factory=list)
    _chars: int = 0

    @property
    def is_open(self) -> bool:
        return bool(self._kind)

    @staticmethod
    def begins(raw: bytes) -> bool:
        return any(sign in raw for sign in _BEGINS)

    @staticmethod
    def head(text: str) -> str:
        """What stands before the first line of a block."""
        return text[: next(place for sign in _SIGNS if (place := text.find(sign)) >= 0)]

    def start(self, text: str) -> None:
        """Begin a block."""
        self.num_starts += 1
        self._lines, self._chars = [text], 0
        if _TABLE in text:
            self._kind = "arguments"
        elif SUMMARY in text:
            self._kind = "summary"
        elif match := _TITAN.search(text):
            self._lines = [match[1]]
            self._kind = "titan"
            if _is_closed(match[1]):
                self._finish()

    def take(self, rest: str) -> bool:
        """Take a line, without its rank, into the open block; False where it does not belong there."""
        if _NO_CONFIGURATION.search(rest):
            return False
        self._lines.append(rest)
        self._chars += len(rest)
        is_end = {
            "arguments": _TABLE_END in rest,
            "summary": bool(SUMMARY_END.match(rest)) and len(self._lines) > 4,
            "titan": rest.rstrip() == "}",
        }[self._kind]
        if is_end or len(self._lines) > _MOST_LINES or self._chars > _MOST_CHARS:
            self._finish()
        return True

    def _finish(self) -> None:
        text = "\n".join(self._lines)
        setattr(self, self._kind, text)
        self._kind, self._lines = "", []

    def note(self, text: str) -> bool:
        """Take a fact from a line; whether the line says nothing else."""
        if match := _MEMORY.search(text):
            unit = 2**20 if match[3] == "MB" else 10**9
            values = {name.strip(): float(value) * unit for name, value in _MEMORY_FIELD.findall(match[4])}
            if len(self.memory_bytes) < 4096:
                self.memory_bytes[int(match[1])] = values
            return True
        if match := _CAPACITY.search(text):
            self.device, self.device_gib = match[1], float(match[2])
            return True
        if match := _MESH.search(text):
            self.mesh = {name: int(value) for name, value in re.findall(r"(\w+)=(\d{1,7})", match[1])}
            return True
        if match := _PEAK_TFLOPS.search(text):
            self.peak_flops = float(match[1])
            return True
        if "xport " in text or "declare -x" in text:
            for name, value in _EXPORT.findall(text):
                if len(self.environment) < _MOST_VARIABLES:
                    self.environment[name] = value
        if "heckpoint" in text and (match := _CHECKPOINT.search(text)):
            self.checkpoints.add("loaded" if match[1] == "loaded" else "saved")
        if (len(self.versions) < len(_VERSIONS) and "ersion" in text) or "torch" in text:
            for pattern, name in _VERSIONS:
                if name not in self.versions and (found := re.search(pattern, text)):
                    self.versions[name] = found[1].rstrip(".")
        return False


def _is_closed(text: str) -> bool:
    return text.count("{") == text.count("}") and text.rstrip().endswith("}")
