"""Each check finds the fault that it is for, and says nothing of a sound target."""

from __future__ import annotations

import errno
import os
import resource
import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import Annotated

import pytest
from msgspec import Meta

from hicache_storage.hookspecs import DriverSpec
from hicache_storage.objects import ObjectStorage
from hicache_storage.plugins import Registry
from hicache_storage.spec import Capabilities, DriverConfig, Durability, HiCacheStorage
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


def test_a_class_that_is_not_complete(monkeypatch):
    monkeypatch.setattr(drivers, "driver_class", lambda _spec: Partial)
    finding, _ = drivers.check_class(SPEC, named=True)
    assert finding.status is Status.FAIL
    assert "does not implement read_objects, write_objects" in finding.detail


def test_the_installed_drivers_are_sound():
    # In a process of its own: what other tests have imported or registered is not installed.
    found = run_python(
        "from hicache_storage.tools.doctor import DoctorTarget, Status, drivers\n"
        "findings = list(drivers.check_drivers(DoctorTarget()))\n"
        "print(len(findings), *[each for each in findings if each.status is not Status.OK])"
    )
    assert int(found.stdout) > 0


# Options
# -------------------------------------------------------------------------------------------------------------


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


# Places
# --------------------------------------------------------------------------------------------------------------


def of_file(path, **options):
    target = DoctorTarget(driver="file", options={"path": str(path), **options})
    return list(endpoints.check_directories(target))


def test_a_directory_that_does_not_exist_yet(tmp_path):
    space, system = of_file(tmp_path / "store")
    assert space.status is Status.OK
    assert str(tmp_path) in space.detail
    assert "O_DIRECT" in system.detail
    assert not list(tmp_path.iterdir())


def test_directories_that_cannot_be_used(tmp_path, monkeypatch):
    """A file system that is not mounted must not look healthy."""
    missing, no_directory = tmp_path / "not-mounted", tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(no_directory))
        for path, said in (
            (missing / "store", f"{missing} does not exist"),
            (no_directory, f"{no_directory} is no directory"),
        ):
            finding = only(of_file(path))
            assert (finding.status, finding.detail) == (Status.FAIL, said)
    assert of_file(tmp_path, capacity="4PiB")[0].status is Status.FAIL
    monkeypatch.setattr(endpoints.os, "access", lambda *_args: False)
    assert "is not writable" in only(of_file(tmp_path)).detail


@pytest.mark.parametrize("unnamed", [True, False])
def test_a_file_system_without_direct_io(tmp_path, monkeypatch, unnamed):
    really_open = os.open

    def refusing(path, flags, mode=0o777):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        if not unnamed and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return really_open(path, flags, mode)

    monkeypatch.setattr(endpoints.os, "open", refusing)
    _, system = of_file(tmp_path)
    assert system.status is Status.WARN
    assert "refuses O_DIRECT" in system.detail
    assert not list(tmp_path.iterdir())


def test_a_clock_that_is_off(tmp_path, monkeypatch):
    monkeypatch.setattr(endpoints.time, "time", lambda: 0.0)
    assert "clock is +" in of_file(tmp_path)[-1].detail


def test_servers(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        options = {"path": str(tmp_path), "metadata_url": url}
        target = DoctorTarget(driver="hf3fs", options=options)
        assert only(endpoints.check_servers(target)).status is Status.OK
    finding = only(endpoints.check_servers(target))
    assert finding.status is Status.FAIL
    assert "cannot be reached" in finding.detail
