"""Whole examinations in their own process: drivers that hang, crash and lie, and what is left
behind."""

from __future__ import annotations

import json

import pytest

from hicache_storage.tools.doctor import DoctorTarget, Role, Status
from hicache_storage.tools.doctor.examination import examine, planned
from hicache_storage.tools.doctor.round_trip import check_round_trip
from tests.support.commands import run_hicache
from tests.tools.conftest import FAULTY, install

pytestmark = pytest.mark.slow(seconds=46)


def diagnose(driver, *checks, options=None, deadline=20.0, grace=60.0):
    target = DoctorTarget(driver=driver, options=options or {}, deadline_seconds=deadline)
    return list(examine(target, checks=list(checks), grace_seconds=grace))


FATAL = {
    "hangs": ("def connect(self): time.sleep(3600)", "hung for"),
    "crashes": (
        "def connect(self): os.kill(os.getpid(), signal.SIGSEGV)",
        "took the process down with SIGSEGV",
    ),
}
FAULTS = {
    "quits": ("def connect(self): sys.exit(3)", "raises SystemExit"),
    "away": (
        "def connect(self): raise StorageUnavailableError('no server')",
        "cannot be opened: no server",
    ),
    "raises": ("def __init__(self, identity): pass", "raises TypeError"),
    "ill": (
        "def check_health(self): return Health(ok=False, detail='degraded')",
        "health() answers: degraded",
    ),
    "full": (
        "def check_health(self): return Health(ok=True, detail='no room', writable=False)",
        "health() answers: no room",
    ),
    "refuses": (
        FAULTY["refuses"],
        (
            "a set of 4 pages answered False for 4 of them (refuses: sets are refused: "
            "[Errno 28] No space left)"
        ),
    ),
    "forgets": (FAULTY["forgets"], "exists finds 0"),
    "misses": (FAULTY["misses"], "a get of 4 pages answered False for 4"),
    "lies": (FAULTY["lies"], "delivered other bytes than were stored"),
    "promises": (
        "@property\ndef capabilities(self): return replace(CAPABILITIES, sharing=Sharing.PROCESSES)",
        "promises more than its driver declares: sharing=processes",
    ),
}

BESIDE = {
    # Such as a mount that answers from a cache: the round trip of one node succeeds.
    "warns": (
        "def connect(self): import logging; logging.warning('a cache of its own')",
        Status.WARN,
        "a cache of its own",
    ),
    "shares": (
        """
        def objects_exist(self, batches, call):
            names = [name[33:] for name in self.objects]
            return [[b.namespace.object_name(k)[33:] in names for k in b.keys] for b in batches]
        """,
        Status.FAIL,
        "a storage of another model finds 4 of the pages",
    ),
    "keeps": (
        "def delete_objects(self, batches, call): return [[True] * len(b.keys) for b in batches]",
        Status.WARN,
        "4 pages are still there after delete()",
    ),
}


@pytest.mark.parametrize("name", FATAL)
def test_a_driver_that_takes_its_process_along(site, name):
    body, said = FATAL[name]
    site.add(name, body)
    # What hangs is waited for; what does not may take as long as a busy machine needs to import
    # torch.
    (finding,) = diagnose(
        name, "round trip", **({"deadline": 0.2, "grace": 4.0} if name == "hangs" else {})
    )
    assert finding.status is Status.FAIL
    assert said in finding.detail
    assert finding.fix


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_driver(site, name):
    body, said = FAULTS[name]
    site.here(name, body)
    finding, *_ = check_round_trip(DoctorTarget(driver=name, throwaway="/nonexistent"))
    assert finding.status is Status.FAIL
    assert said in finding.detail
    assert finding.fix


def test_a_driver_that_cannot_be_imported_alive_is_one_failure(site):
    site.add("exits", "os._exit(7)")
    sound, fatal = diagnose("exits", "open files", "drivers", "round trip")
    assert (sound.check, fatal.check) == ("open files", "drivers")
    assert "ended the process with status 7" in fatal.detail


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_found_beside_a_round_trip_that_succeeds(site, name):
    body, status, said = BESIDE[name]
    site.here(name, body)
    done, found = check_round_trip(DoctorTarget(driver=name, options={"url": "x"}))
    assert done.status is Status.OK
    assert (found.status, found.detail) == (status, said)


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed", "name the authority"),
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number", "write http://"),
        ("Remote end closed connection without response", "write https://"),
        ("refuses: no such token (401 unauthorized)", "a token that the server knows"),
        ("[Errno 13] Permission denied: '/data'", "chown"),
        ("whatever", "start the store, or correct the options"),
    ],
)
def test_a_store_that_cannot_be_opened_has_the_remedy_of_its_cause(site, said, fix):
    site.here("away", f"def connect(self): raise StorageUnavailableError({said!r})")
    (finding,) = check_round_trip(DoctorTarget(driver="away", throwaway="/nonexistent"))
    assert said in finding.detail
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("driver", "options", "said", "fix"),
    [
        ("file", {"path": "{tmp}/not-mounted/store"}, "there is no directory", "mount"),
        ("file", {"path": "{tmp}/file"}, "is a file; name a directory", "lists the options"),
        (
            "hf3fs",
            {"path": "{tmp}/store", "metadata_url": "http://127.0.0.1:1"},
            "http://127.0.0.1:1 does not answer",
            "start the server",
        ),
        (
            "mooncake",
            {"master_server_address": "127.0.0.1:1", "local_hostname": "127.0.0.1"},
            "the master at 127.0.0.1:1 cannot be reached",
            "start the server",
        ),
    ],
)
def test_what_is_not_there_is_one_failure(tmp_path, driver, options, said, fix):
    """The drivers look at what they need themselves: nothing else has to look before them."""
    (tmp_path / "file").touch()
    given = {name: value.replace("{tmp}", str(tmp_path)) for name, value in options.items()}
    (finding,) = check_round_trip(DoctorTarget(driver=driver, options=given))
    assert finding.status is Status.FAIL
    assert said in finding.detail
    assert fix in finding.fix


@pytest.mark.parametrize("role", Role)
def test_a_role_is_asked_what_it_can_mend(role):
    names = planned(DoctorTarget(driver="file", role=role))
    assert {"python", "drivers", "round trip"} <= set(names)
    assert ("torch" in names) is (role is not Role.OPERATOR)
    assert ("open files" in names) is (role is not Role.AUTHOR)


def test_no_page_is_stored_that_could_not_be_removed(site):
    site.here(
        "append",
        "def write_objects(self, batches, call): os._exit(9)",
        capabilities="may_hang=False",
    )
    (finding,) = check_round_trip(DoctorTarget(driver="append", options={"url": "x"}))
    assert finding.status is Status.WARN
    assert "no page was stored" in finding.detail


def test_a_driver_that_needs_a_server_is_not_opened(site):
    site.here("remote", spec="trial_config={'url': 'http://127.0.0.1:{port:meta}'}")
    (finding,) = check_round_trip(DoctorTarget(driver="remote"))
    assert finding.status is Status.WARN
    assert "a throwaway store needs a server" in finding.detail


def test_bad_options_are_named_once(site):
    site.here("sound")
    (finding,) = check_round_trip(DoctorTarget(driver="sound", options={"ulr": "x"}))
    assert finding.status is Status.FAIL
    assert "did you mean 'url'?" in finding.detail


# The command
# ---------------------------------------------------------------------------------------------------------


def doctor(*arguments):
    return run_hicache("doctor", *arguments)


def test_the_command_on_a_sound_driver(site):
    done = doctor("file")
    assert done.returncode == 0, done.stdout
    assert "ok    file: round trip  4 pages" in done.stdout
    # The rest is as it should be.
    assert done.stdout.count("ok  ") == 1
    said = doctor("file", "--role", "engine", "--verbose").stdout
    assert "open files" in said


def test_the_command_on_a_broken_plugin(site):
    install(site.directory, "acme", "plugin_that_is_not_there")
    done = doctor("--json")
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert (answer["schema"], answer["ok"]) == (1, False)
    statuses = {finding["check"]: finding["status"] for finding in answer["findings"]}
    assert [statuses[name] for name in ("file", "hf3fs", "mooncake")] == ["ok"] * 3
    (finding,) = [finding for finding in answer["findings"] if finding["status"] == "fail"]
    assert finding["check"] == "plugins"
    assert "acme:acme is broken" in finding["detail"]
    assert "pip uninstall acme" in finding["fix"]
