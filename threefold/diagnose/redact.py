"""Takes paths, host names, tokens and prompts out of text that is shown, so that it can be sent to somebody else.

A host keeps one name throughout a diagnosis (`host-1`), so that two hosts stay two. A path keeps its last part, and
its place inside a Python package.
"""

import re
from dataclasses import dataclass, field

_SECRET = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|nvapi-[\w-]{20,}"
    r"|sk-[\w-]{16,}|xox[abp]-[\w-]{10,}|AKIA[A-Z0-9]{12,}|eyJ[\w-]{10,}\.[\w-]{10,}[\w.-]*)"
    r"|(?<![\w/.])(?=[A-Za-z0-9+_-]*\d)(?=[A-Za-z0-9+_-]*[A-Za-z])[A-Za-z0-9+_-]{40,}={0,2}"
)
_NAMED_SECRET = re.compile(
    r"""(?i)((?<![a-z])[\w-]*(?:token|secret|passw(?:or)?d|api_?key|access_?key|credential)s?(?:["']?\s*[=:]\s*|\s+(?=["'])))"""
    r"""(?!None\b|True\b|False\b|null\b|\d+\b)(["']?)[\w+/.=~-]{6,}\2"""
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[\w+/.=~-]{8,}")
_LOGIN = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@]+@")
_PROMPT = re.compile(
    r"""(?i)((?:\bprompt|\btext|\bcontent|\bmessages?|\bcompletion|\bquestion|\banswer|\bsample)["']?\s*[=:]\s*)"""
    r"""(\[?\{?)(["'])(?:\\.|(?!\3).){13,}(?:\3|$)"""
)
_EMAIL = re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b")
_ADDRESS = re.compile(
    r"\b(?:\d{1,3}\.){3}\d{1,3}\b|\[?\b(?:[0-9a-f]{1,4}:){4,7}[0-9a-f]{1,4}\b\]?|\b[0-9a-f]{0,4}(?:::?[0-9a-f]{1,4}){2,7}::?[0-9a-f]{0,4}\b"
)
_NAMED_HOST = re.compile(
    r"(?i)((?:\bhost(?:name)?|\bnode(?:name|list)?|\bserver|\bmachine|MASTER_ADDR|\brdzv_endpoint)\s*[=:]\s*[\"']?)"
    r"(?!\d+\b)([a-z][\w.-]*)"
)
_SLURM_HOST = re.compile(
    r"(\b(?:srun|slurmstepd|slurmd)(?:-[\w.-]+)?: (?:error: )?(?:\*\*\* \w+ [\d.]+ ON )?)([a-z][\w.-]*\d[\w.-]*)"
)
_DOMAIN_HOST = re.compile(
    r"\b[a-z][a-z0-9-]*(?:\.[a-z0-9-]+)*\.(?:local|internal|lan|cluster|corp|compute|amazonaws\.com)\b"
)
_NCCL_HOST = re.compile(r"^(?:\S+ )?([a-zA-Z][\w.-]*)(:\d+:\d+ \[\d+\] NCCL )")
_PATH = re.compile(r"""(?<![\w.<>/:])(?:[A-Za-z]:)?(?:~|\.{1,2})?/(?:[\w.@+=,%-]+/)+[\w.@+=,%-]*|(?<=file://)/\S+""")
_PACKAGE = re.compile(r".*/(?:site|dist)-packages/|.*/lib/python\d\.\d+/")
_KEPT = ("/dev/", "/proc/", "/sys/")


@dataclass
class Redactor:
    """Redacts text, unless it is told to leave it raw."""

    raw: bool = False
    _hosts: dict[str, str] = field(default_factory=dict)

    def __call__(self, text: str) -> str:
        if self.raw:
            return text
        text = _LOGIN.sub(r"\1<login>@", text)
        text = _BEARER.sub(r"\1 <token>", text)
        text = _NAMED_SECRET.sub(r"\1<token>", text)
        text = _SECRET.sub("<token>", text)
        text = _PROMPT.sub(r"\1\2<text>", text)
        text = _EMAIL.sub("<address>", text)
        text = _PATH.sub(lambda match: _short(match[0]), text)
        for pattern in (_NAMED_HOST, _SLURM_HOST):
            text = pattern.sub(lambda match: match[1] + self.host(match[2]), text)
        text = _NCCL_HOST.sub(lambda match: self.host(match[1]) + match[2], text)
        text = _ADDRESS.sub(lambda match: self.host(match[0]), text)
        return _DOMAIN_HOST.sub(lambda match: self.host(match[0]), text)

    def host(self, name: str) -> str:
        """The name under which a host is shown."""
        if self.raw or name in ("localhost", "127.0.0.1", "0.0.0.0") or name.startswith("host-"):
            return name
        return self._hosts.setdefault(name, f"host-{len(self._hosts) + 1}")


def _short(path: str) -> str:
    """A path without the folders that name a person or a site."""
    if path.startswith(_KEPT):
        return path
    inside = _PACKAGE.sub("", path)
    if inside != path:
        return inside
    return ".../" + (path.rstrip("/").rpartition("/")[2])
