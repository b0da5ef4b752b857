"""Each check finds the fault that it is for, and says nothing of a sound target."""

from __future__ import annotations

import errno
import os
import resource
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import pytest
from msgspec import Meta

from hicache_storage.hookspecs import DriverSpec
from hicache_storage.objects import ObjectStorage
from hicache_storage.plugins import Registry
from hicache_storage.spec import Capabilities, DriverConfig, Durability, HiCacheStorage, Sharing
from hicache_storage.tools.doctor import DoctorTarget, Status, drivers, endpoints, machine
from tests.support.commands import run_python

SOUND = Capabilities(deletes=True)
TARGET = DoctorTarget(driver="acme")


class Config(DriverConfig, frozen=True, kw_only=True):
    path: Annotated[str, Meta(description="Where.")] = "/tmp"


class Silent(DriverConfig, frozen=True, kw_only=True):
    path: str


class Whole(ObjectStorage):
    def objects_exist(self, batches, call): ...
    def read_objects(self, batches, call): ...
    def write_objects(self, batches, call): ...
    def delete_objects(self, batches, call): ...


class Partial(ObjectStorage):
    def objects_exist(self, batches, call): ...
    def delete_objects(self, batches, call): ...


class OtherArguments(Whole):
    def read_objects(self, batches): ...


SPEC = DriverSpec(
    name="acme", target=f"{__name__}:Whole", config=f"{__name__}:Config", capabilities=SOUND
)


def only(findings):
    (finding,) = findings
    return finding


# Capabilities against methods
# ----------------------------------------------------------------------------------------


def test_a_sound_driver():
    finding = only(drivers.check_capabilities("acme", SOUND, Whole))
    assert (finding.status, finding.detail) == (
        Status.OK,
        "sharing=none, durability=none, deletes, hung_reads=wait",
    )


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"clears": True}, Status.FAIL, "declares 'clears' without clear_namespaces()"),
        (
            {"deletes": False},
            Status.WARN,
            "implements delete_objects() and does not declare 'deletes'",
        ),
        (
            {"networked": True, "may_hang": False},
            Status.FAIL,
            "declares networked and may_hang=False",
        ),
        (
            {"durability": Durability.REOPEN},
            Status.WARN,
            "declares durability=reopen and sharing=none",
        ),
    ],
)
def test_declarations_that_are_not_true(changes, status, said):
    finding = only(drivers.check_capabilities("acme", replace(SOUND, **changes), Whole))
    assert finding.status is status
    assert said in finding.detail
    assert finding.fix


def test_a_driver_without_object_storage_is_held_to_its_own_methods():
    findings = list(
        drivers.check_capabilities("acme", Capabilities(deletes=True, clears=True), HiCacheStorage)
    )
    assert [finding.detail for finding in findings] == [
        "declares 'deletes' without delete()",
        "declares 'clears' without clear()",
    ]


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        (Partial, "does not implement read_objects, write_objects"),
        (OtherArguments, "read_objects() does not take the contract's arguments"),
    ],
)
def test_a_class_that_is_not_what_it_should_be(monkeypatch, driver, said):
    monkeypatch.setattr(drivers, "driver_class", lambda _spec: driver)
    found = [
        finding
        for finding in drivers.check_class(SPEC, named=True)
        if finding.status is Status.FAIL
    ]
    assert said in only(found).detail


def test_the_installed_drivers_are_sound():
    # In a process of its own: what other tests have imported or registered is not installed.
    found = run_python(
        "from hicache_storage.tools.doctor import DoctorTarget, Status, drivers\n"
        "findings = list(drivers.check_drivers(DoctorTarget()))\n"
        "print(len(findings), *[each for each in findings if each.status is not Status.OK])"
    )
    assert int(found.stdout) > 0


def test_an_instance_that_promises_more():
    declared = Capabilities(sharing=Sharing.PROCESS, may_hang=True)
    assert Capabilities(sharing=Sharing.NONE, may_hang=False).exceeding(declared) == []
    assert Capabilities(sharing=Sharing.PROCESSES, clears=True).exceeding(declared) == [
        "sharing=processes",
        "clears=True",
    ]


# Options
# -------------------------------------------------------------------------------------------------------------


def test_a_sound_config(monkeypatch):
    monkeypatch.setattr(drivers, "config_model", lambda _spec: Config)
    assert only(drivers.check_config(SPEC, named=True)).status is Status.OK


@pytest.mark.parametrize(
    ("changes", "model", "status", "said"),
    [
        (
            {"capacity_option": "capacity"},
            Config,
            Status.FAIL,
            "capacity_option names 'capacity', which is no option",
        ),
        (
            {"trial_config": {"paht": "{tmp}"}},
            Config,
            Status.WARN,
            "unknown option 'paht'; did you mean 'path'?",
        ),
        (
            {"trial_config": {"path": "{tmp}"}},
            Silent,
            Status.WARN,
            "path: `hicache drivers acme` has nothing to say about it",
        ),
        (
            {"capabilities": Capabilities(evicts=True)},
            Config,
            Status.WARN,
            "names no capacity option",
        ),
    ],
)
def test_options_that_are_not_true(monkeypatch, changes, model, status, said):
    monkeypatch.setattr(drivers, "config_model", lambda _spec: model)
    finding = only(drivers.check_config(replace(SPEC, **changes), named=True))
    assert finding.status is status
    assert said in finding.detail


def test_what_cannot_be_imported_matters_only_to_who_asks():
    spec = replace(SPEC, target="nowhere:Storage", requires=("acme-client",))
    (named,) = drivers.check_class(spec, named=True)
    (unnamed,) = drivers.check_class(spec, named=False)
    assert (named.status, unnamed.status) == (Status.FAIL, Status.WARN)
    assert named.fix == "pip install acme-client"


# Versions
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requires", "status"),
    [
        (["hicache-storage>=0.1.dev0"], Status.OK),
        (["hicache-storage>=99"], Status.FAIL),
        (["numpy", "not a requirement"], Status.WARN),
        (None, Status.WARN),
    ],
)
def test_the_contract_s_version(monkeypatch, requires, status):
    monkeypatch.setattr(
        drivers, "distribution", lambda _name: SimpleNamespace(version="1.0", requires=requires)
    )
    assert only(drivers.check_requirement("acme", "acme-driver")).status is status


# Plugins
# -------------------------------------------------------------------------------------------------------------


def test_broken_and_rival_plugins(monkeypatch):
    from hicache_storage.plugins import BrokenPlugin

    found = Registry(broken=[BrokenPlugin("acme-pkg:acme", ImportError("no acme"))])
    for owner in ("one:x", "two:x"):
        found.add(replace(SPEC, name="rival"), owner=owner)
    monkeypatch.setattr(drivers, "registry", lambda: found)
    general, broken, rival = drivers.check_plugins(DoctorTarget())
    assert general.status is Status.OK
    assert broken.status is rival.status is Status.FAIL
    assert "acme-pkg:acme is broken: ImportError: no acme" in broken.detail
    assert rival.fix == "pip uninstall all but one of one, two"
    _, broken, rival = drivers.check_plugins(DoctorTarget(driver="other"))
    assert broken.status is rival.status is Status.WARN
    monkeypatch.setenv("HICACHE_DISABLED_PLUGINS", "file")
    assert "hides file" in list(drivers.check_plugins(DoctorTarget()))[-1].detail


def test_a_driver_that_nobody_registers(monkeypatch):
    monkeypatch.setattr(drivers, "registry", Registry)
    assert only(drivers.check_registered(TARGET)).status is Status.FAIL


# The machine
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "privileged", "pinned", "status"),
    [
        (resource.RLIM_INFINITY, False, None, Status.OK),
        (8 << 20, True, 64 << 30, Status.OK),
        (8 << 20, False, 64 << 30, Status.FAIL),
        (8 << 20, False, 1 << 20, Status.OK),
        (8 << 20, False, None, Status.WARN),
    ],
)
def test_locked_memory(monkeypatch, limit, privileged, pinned, status):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _which: (limit, limit))
    monkeypatch.setattr(machine, "_has_capability", lambda _number: privileged)
    assert only(machine.check_locked_memory(DoctorTarget(pinned_bytes=pinned))).status is status


@pytest.mark.parametrize(
    ("limit", "status"),
    [(1024, Status.WARN), (65536, Status.OK), (resource.RLIM_INFINITY, Status.OK)],
)
def test_open_files(monkeypatch, limit, status):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _which: (limit, limit))
    assert only(machine.check_open_files(TARGET)).status is status


@pytest.mark.parametrize(
    ("text", "status"),
    [("always [madvise] never", Status.OK), ("always madvise [never]", Status.WARN)],
)
def test_huge_pages(monkeypatch, tmp_path, text, status):
    monkeypatch.setattr(machine, "_THP", tmp_path / "enabled")
    (tmp_path / "enabled").write_text(text + "\n")
    assert only(machine.check_huge_pages(TARGET)).status is status


@pytest.mark.parametrize(
    ("state", "status"), [(0, Status.OK), (machine.TIME_ERROR, Status.WARN), (-1, Status.WARN)]
)
def test_clock(monkeypatch, state, status):
    monkeypatch.setattr(
        machine.ctypes,
        "CDLL",
        lambda *_args, **_kwargs: SimpleNamespace(adjtimex=lambda _buffer: state),
    )
    assert only(machine.check_clock(TARGET)).status is status


def test_the_real_calls_are_made():
    for check in (
        machine.check_clock,
        machine.check_python,
        machine.check_torch,
    ):
        assert list(check(TARGET))


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (8 << 20, "8.0 MiB"), (500 << 30, "500 GiB"), (1 << 60, "1048576 TiB")],
)
def test_sizes(count, text):
    assert machine.size(count) == text


# Places
# --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def options(monkeypatch):
    chosen = {}
    monkeypatch.setattr(endpoints, "usable_options", lambda _target: chosen)
    monkeypatch.setattr(
        endpoints,
        "registry",
        lambda: SimpleNamespace(get=lambda _name: replace(SPEC, capacity_option="capacity")),
    )
    return chosen


def test_a_directory_in_one_that_does_not_exist(options, tmp_path):
    """A file system that is not mounted must not look healthy."""
    options["path"] = str(tmp_path / "not-mounted" / "store")
    [found] = endpoints.check_directories(TARGET)
    assert found.detail == f"{tmp_path / 'not-mounted'} does not exist"


def test_a_directory_that_does_not_exist_yet(options, tmp_path):
    options["path"] = str(tmp_path / "store")
    space, system = endpoints.check_directories(TARGET)
    assert space.status is Status.OK
    assert str(tmp_path) in space.detail
    assert "O_DIRECT" in system.detail
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_none(options, tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        options["path"] = str(tmp_path / "socket")
        finding = only(endpoints.check_directories(TARGET))
    assert finding.status is Status.FAIL
    assert "is no directory" in finding.detail


def test_a_capacity_that_cannot_be_reached(options, tmp_path):
    options.update(path=str(tmp_path), capacity="4PiB")
    assert next(iter(endpoints.check_directories(TARGET))).status is Status.FAIL


def test_a_directory_that_is_read_only(options, tmp_path, monkeypatch):
    options["path"] = str(tmp_path)
    monkeypatch.setattr(endpoints.os, "access", lambda *_args: False)
    assert "is not writable" in only(endpoints.check_directories(TARGET)).detail


@pytest.mark.parametrize("unnamed", [True, False])
def test_a_file_system_without_direct_io(options, tmp_path, monkeypatch, unnamed):
    really_open = os.open

    def refusing(path, flags, mode=0o777):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        if not unnamed and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return really_open(path, flags, mode)

    options["path"] = str(tmp_path)
    monkeypatch.setattr(endpoints.os, "open", refusing)
    _, system = endpoints.check_directories(TARGET)
    assert system.status is Status.WARN
    assert "refuses O_DIRECT" in system.detail
    assert not list(Path(tmp_path).iterdir())


def test_a_clock_that_is_off(options, tmp_path, monkeypatch):
    options["path"] = str(tmp_path)
    monkeypatch.setattr(endpoints.time, "time", lambda: 0.0)
    assert "clock is +" in list(endpoints.check_directories(TARGET))[-1].detail


def test_servers(options):
    with socket.create_server(("127.0.0.1", 0)) as server:
        options["url"] = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert only(endpoints.check_servers(TARGET)).status is Status.OK
    finding = only(endpoints.check_servers(TARGET))
    assert finding.status is Status.FAIL
    assert "cannot be reached" in finding.detail
