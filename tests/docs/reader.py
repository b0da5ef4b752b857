"""Somebody who reads a page and types what it says: a directory, a virtual environment, a shell and
an interpreter.

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
from pathlib import Path
from typing import TYPE_CHECKING, Final

import yaml

from hicache_conformance.harness.ports import accepts, free_ports
from tests.docs.blocks import COMPARED, printed, steps
from tests.support.environment import ROOT, furnished, make_venv, variables

if TYPE_CHECKING:
    from tests.docs.blocks import Block, Step

WHEELS: Final = os.environ.get("HICACHE_DOCS_WHEELS", "")
SECONDS: Final = 1200 if WHEELS else 120
PORTS: Final = re.compile(r"(?<![\w.])(18\d{3}|6379|700\d|50051)(?!\w)")
"""Ports that pages name. Each stands for a free one, the same for the same number."""
PLACES: Final = ("/var/lib/hicache-metadata", "/etc/hicache", "/data/hicache", "/3fs/hicache")
"""Directories that pages name. Each stands for one of the reader's."""
FOLDERS: Final = ("examples", "benchmarks", "deploy", "scripts")
"""What a page may name as in a checkout."""


class PageError(AssertionError):
    """A block does not do what the page says."""


class Reader:
    """Runs blocks in a directory of their own. Whoever makes one closes it: that ends what was left
    running."""

    def __init__(self, home: Path, page: Path) -> None:
        self._home, self._where = home, home
        self._compares = COMPARED in page.read_text("utf-8")
        self._variables = home / ".variables"
        self._servers, self._ports = list[int](), dict[str, str]()
        self._python: subprocess.Popen[str] | None = None
        self._environment = _fresh(home) if WHEELS else furnished(home)
        for folder in FOLDERS:
            (home / folder).symlink_to(ROOT / folder)
        for place in PLACES:
            (home / place[1:]).mkdir(parents=True)

    def read(self, block: Block) -> None:
        """Run or parse a block.

        Raises:
            PageError: it does not run, ends otherwise than the page says, or cannot be parsed.
        """
        if block.language == "console":
            for step in steps(block.text):
                self._type(block, step)
        elif block.language == "bash":
            self._check(block, block.text, *self._shell("set -e\n" + self._local(block.text)), 0)
        elif block.language == "python":
            self._execute(block)
        else:
            _parse(block)

    def close(self) -> None:
        """End the interpreter, and every server that a command left in the background."""
        if self._python is not None:
            for pipe in (self._python.stdin, self._answers):
                if pipe is not None:
                    pipe.close()
            self._python.wait(30)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for group in self._servers:
                if _alive(group):
                    os.killpg(group, number)
            deadline = time.monotonic() + 20
            while any(map(_alive, self._servers)) and time.monotonic() < deadline:
                time.sleep(0.05)

    def _type(self, block: Block, step: Step) -> None:
        command = self._local(step.command)
        status, said = self._shell(command)
        self._check(block, command, status, said, step.status)
        if _is_background(command):
            self._await(block, command)
        for quoted in step.quoted if self._compares else []:
            if quoted != "..." and not printed(quoted, said):
                raise PageError(f"{block}\n$ {command}\nquoted: {quoted}\n{said}")

    def _check(self, block: Block, command: str, status: int, said: str, expected: int) -> None:
        if status != expected:
            raise PageError(f"{block}: exit status {status}, not {expected}\n$ {command}\n{said}")

    def _shell(self, command: str) -> tuple[int, str]:
        """Run a command where the last one left off: in its directory, with its variables. Servers
        outlive the shell."""
        where, output = self._home / ".where", self._home / ".output"
        script = (
            f"set -a; [[ -e {self._variables} ]] && . {self._variables}; cd "
            f"{shlex.quote(str(self._where))}; set -o pipefail\n"
            f"{command}\nstatus=$?; pwd > {where}; export -p > {self._variables}; exit $status"
        )
        with output.open("w+") as sink:
            shell = subprocess.Popen(
                ["/bin/bash", "-c", script],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
            if _is_background(command):
                self._servers.append(shell.pid)
            try:
                status = shell.wait(SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(shell.pid, signal.SIGKILL)
                shell.wait()
                raise PageError(
                    f"took longer than {SECONDS} s: $ {command}\n{output.read_text()}"
                ) from None
        if where.exists():
            self._where = Path(where.read_text().strip())
        return status, output.read_text("utf-8", errors="replace")

    def _await(self, block: Block, command: str) -> None:
        """Wait until a server accepts on the ports that its command names, as somebody does who
        looks at what it says."""
        deadline = time.monotonic() + 60
        for port in {local for local in self._ports.values() if local in command}:
            while not accepts(int(port)):
                if time.monotonic() > deadline:
                    raise PageError(
                        f"{block}: nobody listens at {port}\n$ "
                        f"{command}\n{(self._home / '.output').read_text()}"
                    )
                time.sleep(0.02)

    def _execute(self, block: Block) -> None:
        if self._python is None:
            self._python = self._start_python()
        assert self._python.stdin is not None
        request = {"name": str(block.page), "line": block.line, "code": self._local(block.text)}
        try:
            self._python.stdin.write(json.dumps(request) + "\n")
            self._python.stdin.flush()
        except BrokenPipeError:
            pass
        answer = self._answers.readline()
        if said := json.loads(answer) if answer else "the interpreter has ended":
            raise PageError(f"{block}\n{said}\n{(self._home / '.printed').read_text()}")

    def _start_python(self) -> subprocess.Popen[str]:
        reading, writing = os.pipe()
        command = f'exec 3>&{writing} {writing}>&-; exec python -P "{Path(__file__).with_name("interpreter.py")}"'
        with (self._home / ".printed").open("w") as sink:
            started = subprocess.Popen(
                ["/bin/bash", "-c", command],
                cwd=self._where,
                env=self._environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=sink,
                pass_fds=[writing],
            )
        os.close(writing)
        self._answers = os.fdopen(reading)
        return started

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


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
