"""`hicache new`: what it makes, what it refuses, and that it conforms as it is made."""

from __future__ import annotations

import sys

import pytest

from hicache_storage.tools.scaffold import (
    MAX_NAME_CHARACTERS,
    STORES,
    check_name,
    make_package,
)
from tests.support.commands import SCRIPTS, run_here, run_hicache, run_program
from tests.support.environment import ROOT, furnished

pytestmark = pytest.mark.slow(seconds=25)

LONGEST = "a" + "2" * (MAX_NAME_CHARACTERS - 3) + "-b"


@pytest.mark.merge
def test_the_package_conforms_as_it_is_made_in_an_environment_of_its_own(tmp_path):
    environment = furnished(tmp_path)
    where = "import hicache_demo_driver as d; print(d.__file__)"
    line = (
        f"hicache new demo && pip install -q ./demo && python -P -c '{where}' && hicache drivers && "
        "hicache conformance run demo --profile smoke && "
        "pytest demo/tests -q -p no:cacheprovider --hicache-level core --hicache-profile smoke"
    )
    done = run_program("/bin/bash", "-c", f"({line}) 2>&1", cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stdout
    assert f"{tmp_path}/venv/lib" in done.stdout
    assert "hicache-demo-driver" in done.stdout
    assert "conformant: every rule of the selected levels" in done.stdout
    assert done.stdout.count("conformant: every rule") == 2


@pytest.mark.merge
@pytest.mark.parametrize(
    # SQLite takes some silent damage of its tree for a row that is not there (FT-1, seldom).
    "store",
    ["directory", pytest.param("sqlite", marks=pytest.mark.long)],
)
def test_a_store_conforms_as_it_is_made(tmp_path, store):
    """`make examples` judges those over a Redis and a bucket."""
    made, site = tmp_path / "made", tmp_path / "site"
    make_package(check_name(f"my-{store}"), made, store)
    pip = ("-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target")
    assert run_program(sys.executable, *pip, site, made).returncode == 0
    run = ("conformance", "run", f"my-{store}", "--profile", "smoke", "--report", tmp_path / "r")
    done = run_program(SCRIPTS / "hicache", *run, PYTHONPATH=str(site))
    assert "conformant: every rule of the selected levels" in done.stderr, done.stderr


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("name", ["x", "acme-kv", "acme_kv2", LONGEST])
def test_the_package_is_well_formed(tmp_path, name, store):
    make_package(check_name(name), tmp_path / "made", store)
    for check in (["check"], ["format", "--check", "--diff"]):
        done = run_program(SCRIPTS / "ruff", *check, ".", cwd=tmp_path / "made")
        assert done.returncode == 0, done.stdout


@pytest.mark.long
@pytest.mark.parametrize("store", STORES)
def test_the_package_is_typed(tmp_path, store):
    make_package(check_name("acme-kv"), tmp_path / "made", store)
    # The cache is worth 10 s: torch is looked into otherwise.
    cache = ROOT / ".mypy_cache" / "generated"
    done = run_program(SCRIPTS / "mypy", "--cache-dir", cache, cwd=tmp_path / "made")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no issues found in" in done.stdout


def test_prints_what_it_made_and_what_to_do_next(tmp_path):
    done = run_hicache("new", "demo", "--directory", "elsewhere", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "elsewhere" / "hicache_demo_driver" / "driver.py").is_file()
    assert "elsewhere/pyproject.toml" in done.stdout
    assert "pip install -e ./elsewhere" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere"}


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Runs `hicache new` in an empty directory, where it is refused; returns what it says."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        before = list(tmp_path.rglob("*"))
        done = run_here("new", *arguments)
        assert done.exit_code == 2
        assert list(tmp_path.rglob("*")) == before
        return done.stderr

    return run


@pytest.mark.parametrize(
    "name",
    ["", "Demo", "../demo", "demo/", "1demo", "demo--kv", "-demo", "de mo", "dämo", "d" * 33],
)
def test_an_unusable_name_is_refused(refused, name):
    assert "cannot be a driver's name" in refused("--", name)


def test_what_is_taken_or_missing_is_refused(refused, tmp_path):
    assert "hicache-storage:file registers a driver 'file' already" in refused("file")
    assert refused("demo", "--directory", "no/such")
    assert "no store 'tape'; there are memory, directory" in refused("demo", "--store", "tape")
    (tmp_path / "demo").mkdir()
    assert "demo exists; nothing has been written" in refused("demo")
