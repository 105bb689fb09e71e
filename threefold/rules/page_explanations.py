"""Explanations of the findings that `threefold explore` and `threefold mcp` raise.

`threefold check --explain SLUG` prints them. They stand here, below `explore/`, because the list of all slugs does.
"""

from threefold.findings import Explanation

EXPLANATIONS = {
    "mcp-installed": Explanation(
        what="The `mcp` package, the SDK of the Model Context Protocol, is installed where a server is started.",
        why="The planner installs without it; only `threefold mcp` needs it.",
        confirm="`python -c 'import mcp'`.",
        fix="pip install 'threefold[mcp]'.",
    ),
    "port-free": Explanation(
        what="The port that `threefold explore` serves its page on is free, and this user may open it.",
        why="A page is served at one address. Another program, perhaps an explorer that still runs, has this one.",
        confirm="`ss -ltn` lists the ports in use.",
        fix="Give another --port, or 0 for any that is free; or end the other program.",
    ),
    "explorer-limits": Explanation(
        what="A request to the explorer stays within its limits: fields, GPUs, chunks, microbatches and lengths.",
        why="Every answer is computed on this machine while somebody waits; a huge plan would hold up all others.",
        confirm="The finding names the field and its limit.",
        fix="Choose a smaller value there, or judge the plan with `threefold check` and `threefold estimate`.",
    ),
}
