"""The pages of the documentation, and the code blocks of each, in their order.

A comment directly above a block exempts it: `<!-- not run: REASON -->`. A comment `<!-- run python
... -->` or `<!-- run console ... -->` is a block that runs and is not shown: what a page's other
blocks need, or checks of what they did.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
RUN: Final = frozenset({"python", "console", "bash"})
PARSED: Final = frozenset({"yaml", "json", "toml", "ini"})
SHOWN: Final = frozenset({"text", "diff", "http", "promql"})
COMPARED: Final = "<!-- output is compared -->"
"""On a page with this line, the lines below a command have to be among those that it prints; `...`
stands for lines left out. What stands behind a `print` of a Python block is compared everywhere."""
PRINTED: Final = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)

_BLOCK: Final = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+?) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$"
    r"|^<!-- run (?P<hidden>python|console)\n(?P<hidden_text>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)
_HERE: Final = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")


@dataclass(frozen=True)
class Block:
    """One block; `line` is that of its first line in the file."""

    page: Path
    line: int
    language: str
    text: str
    reason: str = ""
    """Why it is not run; empty if it is."""

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


@dataclass
class Step:
    """A command, the lines quoted below it, and the exit status that it has to have."""

    command: str
    quoted: list[str] = field(default_factory=list)
    status: int = 0


def pages() -> list[Path]:
    """README and all of docs/; those that take longest first, so that workers end together."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return sorted(
        found,
        key=lambda page: (
            -sum(
                block.language in ("console", "bash") and not block.reason for block in blocks(page)
            )
        ),
    )


def blocks(page: Path) -> list[Block]:
    """All blocks of a page.

    Raises:
        ValueError: a block's language is none that this module knows, so that nobody would find out
        whether it is right.
    """
    text, found = page.read_text("utf-8"), list[Block]()
    for match in _BLOCK.finditer(text):
        hidden = match["hidden"]
        body = (
            match["hidden_text"] if hidden else re.sub(f"(?m)^{match['indent']}", "", match["text"])
        )
        line = text.count("\n", 0, match.start("hidden_text" if hidden else "text")) + 1
        block = Block(page, line, hidden or match["language"], body, match["reason"] or "")
        if block.language not in RUN | PARSED | SHOWN:
            known = ", ".join(sorted(RUN | PARSED | SHOWN))
            raise ValueError(f"{block}: a block of language {block.language!r}; known are {known}")
        found.append(block)
    return found


def steps(text: str) -> list[Step]:
    """The commands of a console block. `$ echo $?` and the number below it belong to the command
    before."""
    found, lines = list[Step](), iter(text.splitlines())
    for line in lines:
        if not line.startswith("$ "):
            if found:
                found[-1].quoted.append(line)
            continue
        command = line[2:]
        while command.endswith("\\"):
            command += "\n" + next(lines)
        if here := _HERE.search(command):
            for more in lines:
                command += "\n" + more
                if more.strip() == here[2]:
                    break
        found.append(Step(command))
    kept = list[Step]()
    for step in found:
        if step.command == "echo $?" and kept:
            kept[-1].status = int(step.quoted[0])
        else:
            kept.append(step)
    return kept


def missing(quoted: list[str], output: str) -> list[str]:
    """Return the quoted lines that were not printed, in their order: spaces, figures and drawn keys
    may differ."""
    lines = map(_without_figures, output.splitlines())
    return [line for line in quoted if line != "..." and _without_figures(line) not in lines]


def _without_figures(line: str) -> str:
    line = re.sub(r"'page\d+-[0-9a-f]{32}'", "'page'", " ".join(line.split()))
    return re.sub(r"\b\d+(?:\.\d+)?(?= (?:ms|s|pass|cases|more)\b)", "0", line)
