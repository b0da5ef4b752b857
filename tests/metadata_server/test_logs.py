"""A log that nobody reads."""

from __future__ import annotations

import os
import subprocess
import sys

LINES = 2000
PROGRAM = f"""
import logging
from hicache_metadata_server.logs import configure_logs
configure_logs("info", "json")
for i in range({LINES}):
    logging.getLogger("x").warning("line %d %s", i, "y" * 100)
print("all", flush=True)
input()
logging.getLogger("x").warning("last")
"""


def test_a_full_pipe_stops_nobody_and_the_lines_that_it_lost_are_counted():
    reading, writing = os.pipe()
    with (
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=writing,
        ) as process,
        open(reading, "rb") as log,
    ):
        os.close(writing)
        try:
            assert process.stdout.readline() == b"all\n"
            os.set_blocking(reading, False)
            text = log.read()
            process.stdin.write(b"\n")
            process.stdin.close()
            os.set_blocking(reading, True)
            rest = log.read()
        finally:
            process.kill()
    assert 0 < text.count(b'"event"') < LINES
    assert b'"lines_dropped"' in rest
    assert b'"last"' in rest
