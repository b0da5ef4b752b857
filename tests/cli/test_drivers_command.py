"""`hicache drivers`, as a user runs it."""

from __future__ import annotations

import pytest

from tests.support.commands import run_hicache, run_python
from tests.tools.conftest import install


def hicache(*arguments, **environment):
    return run_hicache(*arguments, COLUMNS="200", **environment)


@pytest.mark.parametrize(
    ("names", "status", "words"),
    [
        ([], 0, ("hicache-storage:file",)),
        (["file"], 0, ("path", "required", "capacity", "sharing processes", "durability")),
        (["fiel"], 1, ("no driver named 'fiel'; installed:",)),
    ],
)
def test_lists_drivers_and_shows_one_with_its_options(names, status, words):
    done = hicache("drivers", *names)
    assert done.returncode == status, done.stderr
    for word in words:
        assert word in " ".join((done.stdout + done.stderr).split())


def test_a_broken_plugin_is_listed_and_fails_the_command(tmp_path):
    (tmp_path / "acme_plugin.py").write_text("raise RuntimeError('boom')")
    install(tmp_path, "acme", "acme_plugin")
    done = hicache("drivers", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "driver plugin acme:acme is broken and was left out: boom" in done.stderr
    assert "hicache-storage:file" in done.stdout


def test_without_the_cli_extra_the_fix_is_named():
    source = (
        "import sys; sys.modules['typer'] = None\nfrom hicache_storage.cli.main import main\nmain()"
    )
    done = run_python(source, status=1)
    assert "pip install 'hicache-storage[cli]'" in done.stderr
