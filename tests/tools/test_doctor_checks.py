"""Each check finds the fault that it is for, and says nothing of a sound target."""

from __future__ import annotations

import resource
from dataclasses import replace

import pytest

from hicache_storage.hookspecs import DriverSpec
from hicache_storage.objects import ObjectStorage
from hicache_storage.plugins import Registry
from hicache_storage.spec import Capabilities
from hicache_storage.tools.doctor import DoctorTarget, Status, drivers, examination

TARGET = DoctorTarget(driver="acme")
SPEC = DriverSpec(
    name="acme", target="nowhere:Storage", config="nowhere:Config", capabilities=Capabilities()
)


class Partial(ObjectStorage):
    def objects_exist(self, batches, call): ...


class Whole(Partial):
    def read_objects(self, batches, call): ...
    def write_objects(self, batches, call): ...


def only(findings):
    (finding,) = findings
    return finding


# Drivers
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "declared", "said"),
    [
        (Partial, {}, "does not implement read_objects, write_objects"),
        (Whole, {"clears": True}, "declares 'clears' without clear_namespaces()"),
        (Whole, {"networked": True, "may_hang": False}, "declares networked and may_hang=False"),
    ],
)
def test_a_driver_that_lacks_something(monkeypatch, driver, declared, said):
    found = Registry()
    found.add(replace(SPEC, capabilities=Capabilities(**declared)), owner="acme:acme")
    monkeypatch.setattr(drivers, "registry", lambda: found)
    monkeypatch.setattr(drivers, "driver_class", lambda _spec: driver)
    monkeypatch.setattr(drivers, "config_model", lambda _spec: None)
    finding = drivers.check_contract("acme", Status.WARN)
    assert finding.status is Status.FAIL
    assert said in finding.detail


def test_what_cannot_be_imported_matters_only_to_who_asks(monkeypatch):
    found = Registry()
    found.add(replace(SPEC, requires=("acme-client",)), owner="acme:acme")
    monkeypatch.setattr(drivers, "registry", lambda: found)
    named, unnamed = (only(drivers.check_drivers(each)) for each in (TARGET, DoctorTarget()))
    assert (named.status, unnamed.status) == (Status.FAIL, Status.WARN)
    assert named.fix == "pip install acme-client"


# Plugins
# -------------------------------------------------------------------------------------------------------------


def test_broken_plugins(monkeypatch):
    from hicache_storage.plugins import BrokenPlugin

    found = Registry(broken=[BrokenPlugin("acme-pkg:acme", ImportError("no acme"))])
    monkeypatch.setattr(drivers, "registry", lambda: found)
    general, broken = drivers.check_plugins(DoctorTarget())
    assert general.status is Status.OK
    assert broken.status is Status.FAIL
    assert "acme-pkg:acme is broken: ImportError: no acme" in broken.detail
    _, broken = drivers.check_plugins(DoctorTarget(driver="other"))
    assert broken.status is Status.WARN


def test_a_driver_that_nobody_registers(monkeypatch):
    monkeypatch.setattr(drivers, "registry", Registry)
    finding = only(drivers.check_drivers(TARGET))
    assert finding.status is Status.FAIL
    assert "no driver named 'acme'" in finding.detail


# The machine
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "status"),
    [(1024, Status.WARN), (65536, Status.OK), (resource.RLIM_INFINITY, Status.OK)],
)
def test_open_files(monkeypatch, limit, status):
    monkeypatch.setattr(examination.resource, "getrlimit", lambda _which: (limit, limit))
    assert only(examination.check_open_files(TARGET)).status is status
