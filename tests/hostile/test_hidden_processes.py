"""Two users on one store, with a /proc that hides each other's processes: real users, in a mount
namespace of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.hostile, pytest.mark.timeout(120)]

SECONDS = 4

WRITER = """
import os, sys, time
os.umask(0)
from pathlib import Path
from tests.backends.file.harness import Rig, chain
rig = Rig(Path(sys.argv[1]), capacity="4MiB")
rig.storage.open()
os.setgid(int(sys.argv[2])), os.setuid(int(sys.argv[2]))
rig.storage.close()
rig = Rig(Path(sys.argv[1]), capacity="4MiB")
rig.storage.open()
stored = asked = 0
until = time.monotonic() + float(sys.argv[3])
while time.monotonic() < until:
    stored += sum(rig.put(chain(f"{sys.argv[2]}/{asked}", 8)))
    asked += 8
print(asked, stored, rig.storage.get_stats().faults, flush=True)
"""


@pytest.mark.parametrize("hidepid", ["off", "invisible"])
def test_two_users_leave_each_others_drafts_alone(tmp_path, hidepid):
    if os.geteuid():
        pytest.fail("changing users and mounting /proc takes root")
    for path in (tmp_path, *list(tmp_path.parents)[:2]):
        path.chmod(0o777)
    writer = f'"{sys.executable}" -c "$0" "{tmp_path}/store"'
    script = f"mount -t proc -o hidepid={hidepid} proc /proc && umask 0 && ({writer} 65533 {SECONDS} & {writer} 65534 {SECONDS}; wait)"
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", "sh", "-c", script, WRITER],
        check=True,
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    answers = [list(map(int, line.split())) for line in done.stdout.split("\n") if line]
    print(f"\nhidepid={hidepid}: pages set, stored, faults: {answers}")
    assert len(answers) == 2
    for asked, stored, faults in answers:
        assert (stored, faults) == (asked, 0)
