"""The metadata server's HTTP fast path against plain uvicorn: the same server, the same requests,
taking turns.

    python benchmarks/http_fast_path.py

The fast path (`hicache_metadata_server/http/fast_path.py`) relies on uvicorn's internals, and stays
only while lookups gain 1.25x or more. Prints a table; docs/metadata-server.md has the last one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from interleaved import machine, table
from metadata_vs_sglang import GOALS, OUR_COMMAND, measure, spread, started

FAST, PLAIN = "fast path", "plain uvicorn"
GOAL = 1.25
# The fallback of a server whose uvicorn lacks something that the fast path needs.
WITHOUT_FAST_PATH = (
    "from hicache_metadata_server.http import fast_path; "
    "fast_path.missing_internals = lambda: ['benchmark']; "
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--patience", type=float, default=10.0, help="wait for a quiet machine")
    arguments = parser.parse_args()
    option, code, *rest = OUR_COMMAND
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = []
        for name, before in ((PLAIN, WITHOUT_FAST_PATH), (FAST, "")):
            store = f"sqlite:///{directory}/{name.replace(' ', '-')}.db"
            command = [sys.executable, option, before + code, *rest, "PORT", "--store", store]
            servers.append(
                stack.enter_context(started(name, command, directory / "log", dict(os.environ)))
            )
        measure(servers, arguments.rounds, arguments.clients, arguments.seconds, arguments.patience)
    plain, fast = servers
    rows = []
    for operation in GOALS:
        without, with_it = plain.rates[operation], fast.rates[operation]
        cpu = [statistics.median(server.cpu[operation]) * 1e6 for server in servers]
        rows.append(
            [
                f"{operation}, clients: {arguments.clients}",
                spread(without),
                spread(with_it),
                f"{statistics.median(with_it) / statistics.median(without):.2f}x",
                f"{GOAL}x",
                *(f"{value:.0f}" for value in cpu),
                f"{cpu[0] / cpu[1]:.2f}x",
            ]
        )
    header = ["calls a second", PLAIN, FAST, "ratio", "goal", f"CPU us a call, {PLAIN}", FAST]
    print(table([*header, "ratio"], rows))
    print(machine())


if __name__ == "__main__":
    main()
