"""`hicache demo`: what a killed writer has acknowledged comes back."""

from __future__ import annotations

import pytest

from tests.support.commands import run_hicache


@pytest.mark.merge
def test_the_demo_restores_what_a_killed_writer_acknowledged(tmp_path):
    done = run_hicache("demo", "--gib", "0.5", "--path", tmp_path / "store")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed with SIGKILL while it stored the second conversation" in done.stdout
    assert "every acknowledged page came back, every byte verified" in done.stdout
