"""A reader of a page, who types what it says: the page's blocks as one script of bash, run in a
directory and a virtual environment of its own.

The environment has this checkout's wheel and what it depends on, and no index: `pip install
'hicache-storage[server]'` finds everything installed, and any other package refused. With
`HICACHE_DOCS_WHEELS` it is an empty one instead, and pip gets this project from the wheel in that
directory and all else from where pip gets it: `make quickstarts`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
import tomllib
from configparser import ConfigParser
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import yaml

from hicache_conformance.harness.ports import free_ports
from tests.docs.blocks import COMPARED, PRINTED, blocks, missing, steps
from tests.support.environment import ROOT, furnished, make_venv, variables

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.docs.blocks import Block

WHEELS: Final = os.environ.get("HICACHE_DOCS_WHEELS", "")
SECONDS: Final = 3000 if WHEELS else 280
"""For a page; pytest ends a test a little later."""
PORTS: Final = re.compile(r"(?<![\w.])(18\d{3}|6379|700\d|50051)(?!\w)")
"""Ports that pages name. Each stands for a free one, the same for the same number."""
PLACES: Final = ("/var/lib/hicache-metadata", "/etc/hicache", "/data/hicache", "/3fs/hicache")
"""Directories that pages name. Each stands for one of the reader's."""
FOLDERS: Final = ("examples", "benchmarks", "deploy", "scripts")
"""What a page may name as in a checkout."""
BEGINS: Final = "=== block"
"""Printed with a number before each command and block."""
INTERPRETER: Final = """
import os, sys
_done = os.fdopen(3, "w", buffering=1)
for _path in map(str.strip, sys.stdin):
    exec(compile(open(_path).read(), _path, "exec", dont_inherit=True), globals())
    sys.stdout.flush()
    print(file=_done)
"""
"""Executes the Python blocks of a page, one after the other, in one namespace."""
BEGIN: Final = f"""
set -o pipefail
exec 4>&1
begins() {{ printf '\\n{BEGINS} %s\\n' "$1"; }}
ended() {{ [ "$1" = "$2" ] || {{ echo "exit status $1, not $2"; exit 1; }}; }}
listens() {{ until (: < "/dev/tcp/127.0.0.1/$1") 2> /dev/null; do sleep 0.05; done; }}
execute() {{
  [ "$interpreter" ] || coproc interpreter {{ python -P -c {shlex.quote(INTERPRETER)} 3>&1 >&4 2>&4; }}
  echo "$1" >&"${{interpreter[1]}}" && read -r -u "${{interpreter[0]}}" || exit 1
}}
"""


class PageError(AssertionError):
    """A block does not do what the page says."""


class Reader:
    """Runs the blocks of a page in a directory."""

    def __init__(self, home: Path, page: Path) -> None:
        self._home, self._page = home, page
        self._ports = dict[str, str]()
        self._printed = list[tuple[str, list[str]]]()
        """Command or place of each part of the output, and lines that have to be in it."""

    def read(self) -> None:
        """Run or parse all blocks of the page, and end what was left running.

        Raises:
            PageError: one does not run, ends otherwise than the page says, or cannot be parsed.
        """
        environment = _fresh(self._home) if WHEELS else furnished(self._home)
        for folder in FOLDERS:
            (self._home / folder).symlink_to(ROOT / folder)
        for place in PLACES:
            (self._home / place[1:]).mkdir(parents=True)
        script, output = self._home / ".script", self._home / ".output"
        script.write_text("\n".join([BEGIN, *self._lines()]))
        with output.open("w") as sink:
            shell = subprocess.Popen(
                ["/bin/bash", script],
                cwd=self._home,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
        try:
            status = shell.wait(SECONDS)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            _end(shell)
        parts = output.read_text("utf-8", errors="replace").split(f"\n{BEGINS} ")[1:]
        if status != 0 or len(parts) < len(self._printed):
            raise PageError(
                f"ended with {status} in {self._printed[len(parts) - 1][0]}\n{parts[-1]}"
            )
        for (command, quoted), part in zip(self._printed, parts, strict=True):
            if left := missing(quoted, part):
                raise PageError(f"{command}\nquoted: {left[0]}\n{part}")

    def _lines(self) -> Iterator[str]:
        """The script, which stops at the first command that does not end as the page says."""
        compares = COMPARED in self._page.read_text("utf-8")
        for block in blocks(self._page):
            text = self._local(block.text)
            if block.reason:
                continue
            if block.language == "console":
                for step in steps(text):
                    yield self._begins(
                        f"{block}\n$ {step.command}", step.quoted if compares else []
                    )
                    yield f"{{ {step.command}\n}} < /dev/null\nended $? {step.status}"
                    if _is_background(step.command):
                        # As somebody does who looks at what the server says.
                        yield from (
                            f"listens {p}" for p in self._ports.values() if p in step.command
                        )
            elif block.language == "bash":
                yield self._begins(str(block), [])
                yield f"set -e; {{ {text}\n}} < /dev/null; set +e"
            elif block.language == "python":
                file = self._home / f".{block}"
                file.write_text(text)
                yield self._begins(str(block), PRINTED.findall(text))
                yield f"execute {file}"
            else:
                _parse(block)

    def _begins(self, what: str, quoted: list[str]) -> str:
        self._printed.append((what, quoted))
        return f"begins {len(self._printed)}"

    def _local(self, text: str) -> str:
        """A text with this reader's ports and directories."""
        for place in PLACES:
            text = re.sub(rf"(?<![\w.]){place}", str(self._home / place[1:]), text)
        return PORTS.sub(
            lambda match: self._ports.setdefault(match[1], str(free_ports(1)[0])), text
        )


def _fresh(home: Path) -> dict[str, str]:
    """An environment in which nothing is installed but torch, of the size that a machine without a
    GPU needs."""
    make_venv(home, with_pip=True)
    environment = {**os.environ, **variables(home), "PIP_FIND_LINKS": WHEELS}
    command = ["pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), "torch"]
    subprocess.run(command, executable=home / "venv" / "bin" / "pip", env=environment, check=True)
    return environment


def _parse(block: Block) -> None:
    try:
        if block.language == "yaml":
            list(yaml.safe_load_all(block.text))
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "ini":
            # systemd's own dialect: a key may stand several times, and `%` is its own.
            ConfigParser(strict=False, interpolation=None).read_string(block.text)
    except Exception as error:
        raise PageError(f"{block}: is no {block.language}: {error}") from error


def _is_background(command: str) -> bool:
    return bool(re.search(r"(?<!&)&(?: echo \$! > \S+)?\s*(?:#.*)?$", command))


def _end(shell: subprocess.Popen[bytes]) -> None:
    """End a shell, and what it has left in the background."""
    deadline = time.monotonic() + 20
    with suppress(ProcessLookupError):
        os.killpg(shell.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            shell.poll()
            os.killpg(shell.pid, 0)
            time.sleep(0.05)
        os.killpg(shell.pid, signal.SIGKILL)
