"""The conformance suite on two metadata servers and a Redis. `make servers` runs all of it, here
are cases about servers and engines that are killed or hang."""

from __future__ import annotations

import sys

import pytest

from hicache_conformance.model.outcomes import Outcome
from hicache_conformance.model.settings import Settings
from hicache_conformance.runner.run import run

pytestmark = pytest.mark.slow(seconds=35)

SERVE = (
    f'{sys.executable} -c "from hicache_storage.cli.main import main; main()" metadata serve '
    f"--port {{port:PORT}}"
    " --store redis://127.0.0.1:{port:redis}/0 --quarantine-seconds 0.02 --lease-seconds 1"
)
SERVICES = [
    (
        "redis-server --port {port:redis} --bind 127.0.0.1 --dir {tmp} --save '' --appendonly yes "
        "--appendfsync always"
    ),
    *(SERVE.replace("PORT", name) for name in "ab"),
]
URLS = "http://127.0.0.1:{port:a},http://127.0.0.1:{port:b}"
CASES = [
    "test_a_trouble_is_a_miss[services-killed]",
    "test_a_hung_store[services]",
    "test_the_engine_is_killed_while_it_sets",
    "test_processes_share_pages",
]


@pytest.mark.long
def test_the_driver_conforms_on_two_servers_and_a_redis():
    record = run(
        Settings(
            seed=1,
            profile="smoke",
            driver="hf3fs",
            config={"metadata_url": URLS},
            services=SERVICES,
            cases=CASES,
        )
    )
    assert record.finished, record.log[-3000:]
    assert [
        (case.case, case.reason) for case in record.outcomes if case.outcome is not Outcome.PASS
    ] == [], record.log[-3000:]
    assert len(record.outcomes) == len(CASES)
