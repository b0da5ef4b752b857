"""Test support needs no test runner, and imports torch only where it is used."""

from __future__ import annotations

from tests.support.commands import run_python


def test_no_test_runner_is_imported():
    program = "import sys, hicache_storage.testing; print(*{'pytest', 'hypothesis', 'torch'} & set(sys.modules))"
    done = run_python(program)
    assert done.stdout.split() == []
