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
ANY_DTYPE = """

def _any_dtype(namespace):
    identity = replace(namespace.identity, kv_dtype="any")
    return type(namespace)(identity, namespace.pool, namespace.geometry)
"""


@dataclass(frozen=True)
class Mistake:
    """Changes of a driver's sources, the cases that are meant to find them, and what they must say."""

    cases: tuple[str, ...]
    level: str
    said: str
    """A pattern."""
    replaced: tuple[tuple[str, str], ...]
    """Texts that each occur once in the driver's Python or Lua, and others in their place."""
    added: str = ""
    """At the end of the driver's Python."""


NO_ENVELOPE = "answered as a miss: a damaged page, whose envelope is missing or overwritten"
TWO_OBJECTS = r"fail SET-2: .*a damaged page, whose object has no envelope: 24000 bytes, not 24064"
OTHER_DTYPE = r"fail ID-1: .*though it was written under kv_dtype 'bfloat16' \(expected 'float16'\)"
SWALLOWED = r"fail FT-1: .*the driver catches the errors of its store; raise them"
LATE = r"fail GET-9: host page \d+ was written after the get of \S+ had returned"
NO_TIMEOUT = (
    r"fail FT-4: .*calls still wait for them, the first of {} in driver\.py:\d+ in {}: its "
    r"connection has no timeout"
)
HEADS_FIRST = r"fail EV-3: .*a page of the chain was evicted before the pages behind it"

REDIS = {
    "no-envelope": Mistake(
        ("test_pages_read_back",),
        "core",
        NO_ENVELOPE,
        (
            (
                "[write.tobytes() for write in batch.writes]",
                '[b"".join(write.buffers) for write in batch.writes]',
            ),
            ('"bytes": namespace.object_bytes', '"bytes": namespace.page_bytes'),
            ("[read.fill(page) for", "[_copy(read.buffers, page) for"),
        ),
        COPY,
    ),
    "dtype-ignored": Mistake(
        ("test_one_field_differs[kv_dtype]",),
        "identity",
        OTHER_DTYPE,
        (('"namespace": namespace.name,', '"namespace": _any_dtype(namespace).name,'),),
        ANY_DTYPE,
    ),
    "page-and-envelope-apart": Mistake(
        ("test_writers_are_killed",),
        "shared",
        TWO_OBJECTS,
        (
            (
                "[write.tobytes() for write in batch.writes]",
                '[b"".join(write.buffers) for write in batch.writes]',
            ),
            (
                '                stored = _bools(self._run("write", parts, call))\n',
                (
                    '                self._run("write", parts, call)\n'
                    # So that most of the kills fall between the two.
                    "                time.sleep(0.05)\n"
                    "                envelopes = [\n"
                    '                    (b.namespace, [w.key + "#" for w in b.writes],\n'
                    "                     [w.envelope for w in b.writes]) for b in batches]\n"
                    '                stored = _bools(self._run("write", envelopes, call))\n'
                ),
            ),
            (
                (
                    "[read.fill(page) for read, page in zip(batch.reads, pages, strict=True)]\n"
                    "            for batch, pages in "
                    'zip(batches, self._run("read", parts, call), strict=True)'
                ),
                (
                    '[page is not None and read.fill(page + (end or b""))\n'
                    "             for read, page, end in zip(batch.reads, pages, ends, strict=True)]\n"
                    "            for batch, pages, ends in zip(\n"
                    '                batches, self._run("read", parts, call), self._run("read", [\n'
                    '                    (n, [key + "#" for key in keys], ()) for n, keys, _ in parts\n'
                    "                ], call))"
                ),
            ),
            ("'HSTRLEN', pages, key) == batch.bytes end", "'HEXISTS', pages, key) == 1 end"),
        ),
        "import time\n",
    ),
    "errors-swallowed": Mistake(
        ("test_an_outage_is_told_once[network]",),
        "faults",
        SWALLOWED,
        (
            (
                "        for (i, piece), reply in zip(pieces, pipeline.execute(), strict=True):",
                (
                    "        try:\n"
                    "            replies = pipeline.execute()\n"
                    "        except redis.RedisError:\n"
                    "            return answers\n"
                    "        for (i, piece), reply in zip(pieces, replies, strict=True):"
                ),
            ),
        ),
    ),
    "no-timeout": Mistake(
        ("test_half_open_connections[network]",),
        "faults",
        NO_TIMEOUT.format(r"\d", "_run"),
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
    "destination-written-late": Mistake(
        ("test_nothing_arrives_late[network]",),
        "faults",
        LATE,
        (("[read.fill(page) for", "[_copy(read.parts, page) for"),),
        COPY,
    ),
    "tail-made-younger": Mistake(
        ("test_tails_go_before_heads[one-call]",),
        "faults",
        HEADS_FIRST,
        (("call.lru_order(keys[piece])", "[*call.prefix_keys, *keys[piece]]"),),
    ),
}

OBJECT = {
    "no-envelope": Mistake(
        ("test_pages_read_back",),
        "core",
        NO_ENVELOPE,
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
    "dtype-ignored": Mistake(
        ("test_one_field_differs[kv_dtype]",),
        "identity",
        OTHER_DTYPE,
        (
            (
                'return f"{namespace.name}/',
                'namespace = _any_dtype(namespace)\n    return f"{namespace.name}/',
            ),
        ),
        ANY_DTYPE,
    ),
    "page-and-envelope-apart": Mistake(
        ("test_writers_are_killed",),
        "shared",
        TWO_OBJECTS,
        (
            ("write.tobytes()", 'b"".join(write.buffers)'),
            ("== namespace.object_bytes", "is not None"),
            (
                'payload, mode="create")\n',
                (
                    'payload, mode="create")\n'
                    "                    await asyncio.sleep(0.05)\n"
                    '                    await obstore.put_async(self._store, name + "#", '
                    "write.envelope)\n"
                ),
            ),
            (
                (
                    "payload = await answer.bytes_async()\n"
                    "            except FileNotFoundError:\n"
                    "                return False\n"
                ),
                (
                    "payload = bytes(await answer.bytes_async())\n"
                    "            except FileNotFoundError:\n"
                    "                return False\n"
                    "            try:\n"
                    "                answer = await obstore.get_async(\n"
                    '                    self._store, _name(read.namespace, read.key) + "#")\n'
                    "                payload += bytes(await answer.bytes_async())\n"
                    "            except FileNotFoundError:\n"
                    "                pass\n"
                ),
            ),
        ),
        "import asyncio\n",
    ),
    "errors-swallowed": Mistake(
        ("test_an_outage_is_told_once[network]",),
        "faults",
        SWALLOWED,
        (
            (
                "except FileNotFoundError:\n                return False",
                "except (FileNotFoundError, BaseError):\n                return False",
            ),
            (
                "except FileNotFoundError:\n                return None",
                "except (FileNotFoundError, BaseError):\n                return None",
            ),
        ),
    ),
    # A request that waits in the thread of the event loop: no deadline can cancel it.
    "no-timeout": Mistake(
        ("test_half_open_connections[network]",),
        "faults",
        NO_TIMEOUT.format("1", "read_object"),
        (
            ("answer = await obstore.get_async(", "answer = obstore.get("),
            ("payload = await answer.bytes_async()", "payload = answer.bytes()"),
            ('"timeout": "60s"', '"timeout": "3600s"'),
        ),
    ),
    "destination-written-late": Mistake(
        ("test_nothing_arrives_late[network]",),
        "faults",
        LATE,
        (
            (
                (
                    "                answer = await obstore.get_async("
                    "self._store, _name(read.namespace, read.key))\n"
                    "                payload = await answer.bytes_async()\n"
                ),
                "                return await asyncio.to_thread(self._fetch, read)\n",
            ),
            (
                "        return read.fill(memoryview(payload))\n",
                (
                    "\n    def _fetch(self, read):\n"
                    "        page = obstore.get(self._store, _name(read.namespace, read.key)).bytes()\n"
                    "        return _copy(read.parts, memoryview(page))\n"
                ),
            ),
            ("from contextlib import", "import asyncio\nfrom contextlib import"),
        ),
        COPY,
    ),
}
"""Nothing is evicted there, so that no tail can be younger than its head."""

FOR_EACH_CHANGE = ("redis-tail-made-younger", "object-no-envelope")
"""A mistake for each driver; `make test-long` plants the others."""
PLANTED = [
    pytest.param(
        name,
        mistake,
        id=f"{name}-{title}",
        marks=[] if f"{name}-{title}" in FOR_EACH_CHANGE else [pytest.mark.long],
    )
    for name, mistakes in (("redis", REDIS), ("object", OBJECT))
    for title, mistake in mistakes.items()
]


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


@pytest.mark.parametrize(("name", "mistake"), PLANTED)
def test_a_planted_mistake_is_found_by_its_cause(site, tmp_path, name, mistake):
    _plant(name, mistake, tmp_path)
    ran = site.hicache(
        *("conformance", "run", name, "--seed", "1", "--profile", "smoke"),
        *("--level", mistake.level, *(part for case in mistake.cases for part in ("--case", case))),
        PYTHONPATH=f"{tmp_path}:{site.environment['PYTHONPATH']}",
        COLUMNS="300",
    )
    assert ran.status == 1, ran.output
    assert re.search(mistake.said, ran.output), ran.output
