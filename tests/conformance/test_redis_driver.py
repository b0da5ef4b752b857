"""`examples/hicache-redis-driver`, judged on a real Redis; and mistakes that authors make in it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow(seconds=200), pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "hicache-redis-driver"
PACKAGE = "hicache_redis_driver"
MAX_LINES = 160
HELPER = """

def _any_dtype(namespace):
    identity = replace(namespace.identity, kv_dtype="any")
    return type(namespace)(identity, namespace.pool, namespace.geometry)
"""


@pytest.fixture
def redis_site(site, tmp_path):
    """Run `hicache conformance run redis` on a copy of the example, with replaced texts."""

    def run(*arguments, **replaced):
        home = tmp_path / "driver"
        shutil.copytree(EXAMPLE / PACKAGE, home / PACKAGE)
        info = home / "hicache_redis_driver-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: hicache-redis-driver\nVersion: 0.1.0\n"
        )
        (info / "entry_points.txt").write_text(
            f"[hicache_storage.drivers]\nredis = {PACKAGE}.plugin\n"
        )
        for name, (before, after) in replaced.items():
            path = home / PACKAGE / name.replace("_", ".")
            text = path.read_text("utf-8")
            assert text.count(before) == 1, before
            path.write_text(text.replace(before, after) + (HELPER if "any" in after else ""))
        return site.hicache(
            *("conformance", "run", "redis", "--seed", "1", "--profile", "smoke"),
            *("--report", str(tmp_path / "report"), *arguments),
            seconds=800,
            PYTHONPATH=f"{home}:{site.environment['PYTHONPATH']}",
            COLUMNS="300",
        )

    return run


def test_it_conforms_at_every_level(redis_site, tmp_path, results):
    ran = redis_site()
    assert ran.status == 0, ran.output
    report = results(tmp_path / "report")
    undeclared = {rule["id"] for rule in report["rules"] if rule["outcome"] == "not declared"}
    # Messages of a networked driver take memory of their own.
    assert undeclared == {"BU-2"}
    assert report["totals"]["untested"] == 0


def test_it_stays_small():
    lines = [
        line.strip()
        for name in ("driver.py", "store.lua")
        for line in (EXAMPLE / PACKAGE / name).read_text("utf-8").splitlines()
    ]
    code = [line for line in lines if line and not line.startswith(("#", "--", '"""'))]
    assert len(code) <= MAX_LINES


@pytest.mark.parametrize(
    ("arguments", "replaced", "said"),
    [
        pytest.param(
            ("--level", "core", "--case", "test_pages_read_back"),
            {
                "driver_py": (
                    "[write.tobytes() for write in batch.writes]",
                    '[b"".join(write.buffers) + bytes(64) for write in batch.writes]',
                )
            },
            "a damaged page, whose envelope is missing or overwritten",
            id="no-envelope",
        ),
        pytest.param(
            ("--level", "identity", "--case", "test_one_field_differs[kv_dtype]"),
            {
                "driver_py": (
                    '"namespace": namespace.name,',
                    '"namespace": _any_dtype(namespace).name,',
                )
            },
            "a damaged page, whose envelope belongs to another identity, pool or geometry",
            id="dtype-ignored",
        ),
        pytest.param(
            ("--level", "faults", "--case", "tails"),
            {"store_lua": ("turn - i, key", "turn - #chain + i, key")},
            "fail EV-",
            id="tail-made-younger",
        ),
    ],
)
def test_a_planted_mistake_is_found_by_its_cause(redis_site, arguments, replaced, said):
    ran = redis_site(*arguments, **replaced)
    assert ran.status == 1, ran.output
    assert said in ran.output
