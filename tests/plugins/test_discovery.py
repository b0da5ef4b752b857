"""Finding drivers: lazily, one by one, with errors that name the plugin and the fix."""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint

import pytest

from hicache_storage import plugins
from hicache_storage.hookspecs import ENTRY_POINT_GROUP
from hicache_storage.spec import (
    ConfigError,
    DriverContractError,
    DriverNotFoundError,
    DriverUnavailableError,
)
from tests.support.commands import run_python

GOOD = """
from hicache_storage import Capabilities, DriverSpec, hookimpl

@hookimpl
def hicache_register_drivers():
    return [DriverSpec(name={name!r}, target={target!r}, config="hicache_storage.spec:DriverConfig",
                       capabilities=Capabilities(), requires=("acme-client",))]
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Write a plugin module and return its entry point."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(name, source=GOOD, target="acme.driver:Storage", driver=None):
        module = f"plugin_{name}_{tmp_path.name}"
        text = source.replace("{name!r}", repr(driver or name)).replace("{target!r}", repr(target))
        (tmp_path / f"{module}.py").write_text(text)
        importlib.invalidate_caches()
        return EntryPoint(name, module, ENTRY_POINT_GROUP)

    return make


HOOK = "from hicache_storage import hookimpl\n@hookimpl\ndef "


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise RuntimeError('boom')", "boom"),
        ("import no_such_module", "no_such_module"),
        ("x = 1", "implements no hook"),
        (
            "import pluggy\n@pluggy.HookimplMarker('hicache')\ndef hicache_register_drivers(): return []",
            "implements no hook",
        ),
        (HOOK + "hicache_register_driver(): return []", "hicache_register_driver"),
        (HOOK + "hicache_register_drivers(config): return []", "config"),
        (HOOK + "hicache_register_drivers(): raise OSError('late')", "late"),
        (HOOK + "hicache_register_drivers(): return ['acme']", "DriverSpec"),
        (HOOK + "hicache_register_drivers(): yield 1/0", "zero"),
    ],
)
def test_a_broken_plugin_is_reported_and_stops_nobody_else(plugin, source, message):
    registry = plugins.discover([plugin("bad", source), plugin("good")])
    assert list(registry.drivers) == ["good"]
    assert [broken.owner for broken in registry.broken] == ["local:bad"]
    assert message in str(registry.broken[0].error)
    with pytest.raises(
        DriverNotFoundError,
        match=r"no driver named 'bad'; installed: good; plugin local:bad is broken",
    ):
        registry.get("bad")


def test_two_plugins_with_one_name(plugin):
    registry = plugins.discover(
        [plugin("one", driver="acme"), plugin("two", driver="acme"), plugin("three")]
    )
    reason = "plugin local:two is broken: local:one registers a driver 'acme', too; uninstall one"
    with pytest.raises(DriverNotFoundError, match=f"; installed: three; {reason}"):
        registry.get("acme")
    assert registry.get("three").name == "three"


def test_a_driver_whose_dependency_is_missing(plugin):
    spec = plugins.discover([plugin("acme")]).get("acme")
    with pytest.raises(
        DriverUnavailableError,
        match=r"'acme': cannot import acme\.driver:Storage; it needs acme-client",
    ):
        plugins.driver_class(spec)


def test_a_target_that_is_no_storage(plugin):
    spec = plugins.discover([plugin("acme", target="collections:OrderedDict")]).get("acme")
    with pytest.raises(DriverContractError, match="not a subclass of HiCacheStorage"):
        plugins.driver_class(spec)


def test_create_storage(kit, tmp_path):
    with plugins.create_storage("file", kit.identity(), {"path": str(tmp_path)}) as storage:
        storage.register_mem_host_pool_v2(pool := kit.pool(), "kv")
        assert storage.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [True]}
    with pytest.raises(DriverNotFoundError, match=r"no driver named 'fiel'; installed: .*file"):
        plugins.create_storage("fiel", kit.identity())
    with pytest.raises(ConfigError, match="unknown option 'paht'; did you mean 'path'"):
        plugins.create_storage("file", kit.identity(), {"paht": "x"})


def test_nothing_heavy_is_imported_until_it_is_needed(tmp_path):
    """Discovery, construction and host pools of the protocol load no torch, and never a test or server
    library; test support does neither."""
    source = f"""
import contextlib, sys
from hicache_storage import StorageIdentity, create_storage
from hicache_storage.plugins import registry
from hicache_storage.pools import page_access
from hicache_storage.spec import InvalidPoolError
from hicache_storage.testing import BytePool
assert "file" in registry().drivers
storage = create_storage("file", StorageIdentity(model="m", kv_dtype="b", page_size=1, layout="l"), {{"path": {str(tmp_path / "x")!r}}})
assert len(page_access(BytePool()).sources([2, 4])) == 2
with contextlib.suppress(InvalidPoolError):
    page_access(object())
heavy = {{"torch", "numpy", "mooncake", "hf3fs_fuse", "starlette", "aiohttp", "hypothesis", "pytest", "typer", "rich", "jinja2"}}
print(sorted(heavy & set(sys.modules)))
storage.close()
"""
    done = run_python(source)
    assert done.stdout.strip() == "[]"
    assert not (tmp_path / "x").exists()
