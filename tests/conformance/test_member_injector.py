"""Several stores, of which one is killed, stopped or cut off: the others answer."""

from __future__ import annotations

import sys

import pytest

from hicache_conformance.fixtures.environment import DriverSetup
from hicache_conformance.injectors.members import MemberInjector
from hicache_conformance.model.fault_plan import FaultKind
from tests.conformance.fault_helpers import MAX_SECONDS, background, find_fault
from tests.conformance.test_server_injector import SERVER, asked

STORES = ("a", "b")
MOONCAKE = ("store", "store2", "store3")
BESIDE = ["serve --port {port:store}", "serve --port {port:store2} --first 127.0.0.1:{port:store}"]


@pytest.fixture
def members(tmp_path):
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    commands = [
        [sys.executable, "-S", str(script), f"{{port:{name}}}", f"{{tmp}}/{name}"]
        for name in STORES
    ]
    injector = MemberInjector(commands, STORES, STORES)
    yield injector
    injector.close()


def told(members, name, line):
    return asked(members.ports[name], line)


def test_a_killed_store_is_back_on_its_port_and_the_other_has_run_on(members):
    assert told(members, "a", b"1") == told(members, "b", b"1") == b"1"
    find_fault(members, FaultKind.KILL, member="a")
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        told(members, "a", b"2")
    assert told(members, "b", b"2") == b"12"
    members.heal()
    assert told(members, "a", b"2") == b"12"
    assert members.injected_count() == 1


def test_a_stopped_store_answers_when_it_goes_on(members):
    find_fault(members, FaultKind.HANG, member="b")
    thread, answers = background(lambda: told(members, "b", b"1"))
    assert told(members, "a", b"1") == b"1"
    thread.join(0.1)
    assert thread.is_alive()
    members.heal()
    thread.join(MAX_SECONDS)
    assert answers == [b"1"]


def test_a_store_that_is_cut_off_refuses_connections_and_runs_on(members):
    find_fault(members, FaultKind.REFUSE, member="a")
    with pytest.raises(ConnectionRefusedError):
        told(members, "a", b"1")
    assert told(members, "b", b"1") == b"1"
    members.heal()
    assert told(members, "a", b"1") == b"1"


def test_stores_are_gone_when_closed(members):
    port = members.ports["a"]
    members.close()
    with pytest.raises(ConnectionRefusedError):
        asked(port, b"1")


def test_stores_that_no_option_names_are_started_for_cases_about_several():
    assert DriverSetup("mooncake", {}, None).members() == (MOONCAKE, ())
    assert DriverSetup("mooncake", {}, None).outages() == ["killed", "stopped"]
    assert len(DriverSetup("mooncake", {}, None).commands()) == 2


def test_stores_that_an_option_names_are_always_started_and_can_be_cut_off():
    options = {"local_hostname": "{port:store},{port:store2}"}
    stores = MOONCAKE[:2]
    assert DriverSetup("mooncake", options, BESIDE).members() == (stores, stores)
    assert DriverSetup("mooncake", options, BESIDE).outages() == ["killed", "stopped", "cut-off"]
    assert len(DriverSetup("mooncake", options, BESIDE).commands()) == 2


@pytest.mark.parametrize(
    ("driver", "options", "services"),
    [
        ("hf3fs", {}, None),
        ("file", {}, None),
        ("mooncake", {"master_server_address": "10.0.0.1:50051"}, None),
        ("mooncake", {}, BESIDE[:1]),
        ("no-such-driver", {}, None),
    ],
)
def test_fewer_than_two_stores_are_not_several(driver, options, services):
    assert DriverSetup(driver, options, services).outages() == []
