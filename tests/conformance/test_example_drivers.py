"""Mistakes that authors make, planted into the example drivers, are found by messages that name them.

On a real Redis, and on moto's server of the S3 protocol. `make examples` judges the drivers as they
are.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

# One run for each mistake; most of it is waiting.
pytestmark = [pytest.mark.slow(seconds=150), pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_LINES = 160

COPY = """

def _copy(parts, page):
    if page is None:
        return False
    start = 0
    for part in parts:
        part[:] = page[start : start + len(part)]
        start += len(part)
    return True
"""


@dataclass(frozen=True)
class Mistake:
    """Changes of a driver's source, the case that is meant to find them, and what it must say."""

    case: str
    level: str
    said: str
    """A pattern."""
    replaced: tuple[tuple[str, str], ...]
    """Texts that each occur once in the driver's Python or Lua, and others in their place."""
    added: str = ""
    """At the end of the driver's Python."""


MISTAKES = {
    ("redis", "tail made younger"): Mistake(
        "test_tails_go_before_heads[one-call]",
        "faults",
        r"fail EV-3: .*a page of the chain was evicted before the pages behind it",
        (("call.lru_order(keys[piece])", "[*call.prefix_keys, *keys[piece]]"),),
    ),
    ("redis", "no timeout"): Mistake(
        "test_half_open_connections[network]",
        "faults",
        r"fail FT-4: .*calls still wait for them, the first of \d in driver\.py:\d+ in _run: its "
        r"connection has no timeout",
        (
            (
                (
                    "timeout=seconds,\n            socket_timeout=seconds,\n"
                    "            socket_connect_timeout=seconds,"
                ),
                "timeout=None, socket_timeout=None, socket_connect_timeout=None,",
            ),
        ),
    ),
    ("object", "no envelope"): Mistake(
        "test_pages_read_back",
        "core",
        "answered as a miss: a damaged page, whose envelope is missing or overwritten",
        (
            ("write.tobytes()", 'b"".join(write.buffers)'),
            ("== namespace.object_bytes", "== namespace.page_bytes"),
            (
                "return read.fill(memoryview(payload))",
                "return _copy(read.buffers, memoryview(payload))",
            ),
        ),
        COPY,
    ),
}


def _package(name: str) -> Path:
    return EXAMPLES / f"hicache-{name}-driver" / f"hicache_{name}_driver"


def _code(path: Path) -> list[str]:
    lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    return [line for line in lines if line and not line.startswith(("#", "--", '"""'))]


def _plant(name: str, mistake: Mistake, home: Path) -> None:
    """Make `home` a place in which a copy of the example, with the mistake, counts as installed."""
    package = home / _package(name).name
    shutil.copytree(_package(name), package)
    info = home / f"{package.name}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: hicache-{name}-driver\nVersion: 0.1.0\n"
    )
    (info / "entry_points.txt").write_text(
        f"[hicache_storage.drivers]\n{name} = {package.name}.plugin\n"
    )
    sources = [path for path in (package / "driver.py", package / "store.lua") if path.exists()]
    for before, after in mistake.replaced:
        [path] = [path for path in sources if before in path.read_text("utf-8")]
        text = path.read_text("utf-8")
        assert text.count(before) == 1, before
        path.write_text(text.replace(before, after))
    with (package / "driver.py").open("a") as file:
        file.write(mistake.added)


@pytest.mark.parametrize(
    ("name", "sources"), [("redis", ["driver.py", "store.lua"]), ("object", ["driver.py"])]
)
def test_it_stays_small(name, sources):
    assert sum(len(_code(_package(name) / source)) for source in sources) <= MAX_LINES


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("redis", "tail made younger"),
        pytest.param("redis", "no timeout", marks=pytest.mark.long),
        ("object", "no envelope"),
    ],
)
def test_a_planted_mistake_is_found_by_its_cause(site, tmp_path, name, title):
    mistake = MISTAKES[name, title]
    _plant(name, mistake, tmp_path)
    ran = site.hicache(
        *("conformance", "run", name, "--seed", "1", "--profile", "smoke"),
        *("--level", mistake.level, "--case", mistake.case),
        PYTHONPATH=f"{tmp_path}:{site.environment['PYTHONPATH']}",
        COLUMNS="300",
    )
    assert ran.status == 1, ran.output
    assert re.search(mistake.said, ran.output), ran.output
