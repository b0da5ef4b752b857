"""The way of a driver's author, with real installs.

pip, `hicache drivers`, the suite, and what it says to a planted fault.
"""

from __future__ import annotations

import shutil

import pytest

from tests.support.author import ROOT, Author

pytestmark = pytest.mark.slow(seconds=100)

EXAMPLE = ROOT / "examples" / "hicache-memory-driver"
SMOKE = "--profile smoke --seed 11"

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "hicache-faulty-drivers"
version = "0.1.0"

[project.entry-points."hicache_storage.drivers"]
faulty = "hicache_faulty_drivers.plugin"
"""

PLUGIN = """
from dataclasses import replace

from hicache_memory_driver import plugin as right
from hicache_storage.hookspecs import hookimpl


@hookimpl
def hicache_register_drivers():
    (memory,) = right.hicache_register_drivers()
    return [replace(memory, name="faulty", target="hicache_faulty_drivers.driver:Faulty")]
"""

DRIVER = """
from dataclasses import replace

from hicache_memory_driver.driver import MemoryStorage


class Faulty(MemoryStorage):
    \"\"\"The KV's dtype is left out of the namespace.\"\"\"

    def __init__(self, identity, config):
        super().__init__(replace(identity, kv_dtype="any"), config)
        self._told = identity

    @property
    def identity(self):
        return self._told
"""


@pytest.fixture(scope="module")
def author(tmp_path_factory):
    """Has installed this project's wheel, the example, and a package with a faulty driver."""
    home = tmp_path_factory.mktemp("author")
    faulty = home / "faulty"
    (faulty / "hicache_faulty_drivers").mkdir(parents=True)
    (faulty / "pyproject.toml").write_text(PYPROJECT)
    (faulty / "hicache_faulty_drivers" / "__init__.py").touch()
    (faulty / "hicache_faulty_drivers" / "plugin.py").write_text(PLUGIN)
    (faulty / "hicache_faulty_drivers" / "driver.py").write_text(DRIVER)
    # A copy, because a build leaves files beside its sources.
    example = shutil.copytree(
        EXAMPLE,
        home / "example",
        ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"),
    )
    author = Author(home)
    author.install(ROOT, example, faulty)
    return author


def test_the_driver_fits_in_60_lines():
    lines = (EXAMPLE / "hicache_memory_driver" / "driver.py").read_text("utf-8").splitlines()
    assert len([line for line in lines if line.strip()]) <= 60


def test_everything_comes_from_the_author_s_own_environment(author):
    """What `hicache new` makes, too."""
    modules = "hicache_conformance, hicache_memory_driver, hicache_demo_driver"
    where = f"import {modules}; print(*(each.__file__ for each in ({modules})))"
    done = author.shell(f"hicache new demo && pip install -q ./demo && python -P -c '{where}'")
    paths = done.stdout.splitlines()[-1].split()
    assert len(paths) == 3, done.stdout
    assert all(path.startswith(str(author.home / "venv")) for path in paths)


def test_the_driver_is_found(author):
    done = author.shell("hicache drivers")
    assert done.returncode == 0, done.stdout
    assert "memory" in done.stdout
    assert "hicache-memory-driver:memory" in done.stdout


def test_the_driver_conforms(author):
    done = author.shell(f"hicache conformance run memory --level core,pools {SMOKE}")
    assert done.returncode == 0, done.stdout
    assert "conformant: every rule" in done.stdout


@pytest.mark.long
def test_the_author_s_own_pytest_agrees(author):
    done = author.shell(
        "pytest example/tests -q -p no:cacheprovider --hicache-level core --hicache-profile smoke"
    )
    assert done.returncode == 0, done.stdout
    assert "\nconformant: every rule" in done.stdout


def test_a_planted_fault_is_told_by_the_bytes(author):
    done = author.shell(
        f"hicache conformance run faulty --level identity {SMOKE} --case 'test_one_field_differs[kv_dtype]'"
    )
    assert done.returncode == 1, done.stdout
    assert "holds bytes written under kv_dtype 'bfloat16' (expected 'float16')" in done.stdout
