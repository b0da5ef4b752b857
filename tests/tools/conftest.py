"""Driver packages that count as installed, in this process's children."""

from __future__ import annotations

import importlib
import sys
import textwrap

import pytest

from hicache_storage.plugins import registry

PLUGIN = """
from hicache_storage.hookspecs import DriverSpec, hookimpl
from hicache_storage.spec import Capabilities, Durability, Sharing


@hookimpl
def hicache_register_drivers():
    return [
        DriverSpec(
            name={name!r}, target="{module}:Storage", config="{module}:Config",
            capabilities=Capabilities({capabilities}), {spec}
        )
    ]
"""

DRIVER = """
import os, signal, sys, time
from dataclasses import replace

from hicache_storage.spec import Capabilities, DriverConfig, Health, Sharing, StorageUnavailableError
from hicache_storage.testing import MemoryStorage

CAPABILITIES = Capabilities({capabilities})
OBJECTS = {{}}


class Config(DriverConfig, frozen=True, kw_only=True):
    url: str = ""


class Storage(MemoryStorage):
    def __init__(self, identity, config):
        super().__init__(identity, OBJECTS, driver_name={name!r}, capabilities=CAPABILITIES)

{body}
"""


FAULTY = {
    "refuses": "def write_objects(self, batches, call): raise OSError(28, 'No space left')",
    "breaks": "def write_objects(self, batches, call): raise RuntimeError('no such call')",
    "forgets": "def objects_exist(self, batches, call): return [[False] * len(b.keys) for b in batches]",
    "misses": "def read_objects(self, batches, call): return [[False] * len(b.reads) for b in batches]",
    "lies": (
        "def batch_get_v2(self, transfers, extra_info=None):\n"
        "    return {t.name: [True] * len(t.keys) for t in transfers}"
    ),
}
"""Bodies of drivers whose answers are wrong."""


class Site:
    """A directory on the path of child processes, and of this one as far as `here` is asked."""

    def __init__(self, directory, monkeypatch):
        self.directory = directory
        self._monkeypatch = monkeypatch

    def here(self, name, *arguments, **options):
        """Install a driver as `add` does, and for this process too."""
        self.add(name, *arguments, **options)
        for module in (f"plugin_{name}", f"driver_{name}"):
            # Another test may have had another driver of this name.
            sys.modules.pop(module, None)
        (spec,) = importlib.import_module(f"plugin_{name}").hicache_register_drivers()
        for known, value in ((registry().drivers, spec), (registry().owners, f"{name}:{name}")):
            self._monkeypatch.setitem(known, name, value)

    def add(
        self,
        name,
        body="pass",
        *,
        capabilities="deletes=True, may_hang=False",
        spec="",
    ):
        """Install a driver: a dictionary of its process, with what `body` changes."""
        module, plugin = f"driver_{name}", f"plugin_{name}"
        words = {"name": name, "module": module, "capabilities": capabilities, "spec": spec}
        (self.directory / f"{plugin}.py").write_text(PLUGIN.format(**words))
        (self.directory / f"{module}.py").write_text(
            DRIVER.format(**words, body=textwrap.indent(textwrap.dedent(body), "    "))
        )
        install(self.directory, name, plugin)


def install(directory, name, plugin):
    """Install nothing but an entry point, whatever its module."""
    info = directory / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[hicache_storage.drivers]\n{name} = {plugin}\n")


@pytest.fixture
def site(tmp_path, monkeypatch):
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(directory))
    # The processes of an examination take over the path of this one.
    monkeypatch.syspath_prepend(str(directory))
    return Site(directory, monkeypatch)
