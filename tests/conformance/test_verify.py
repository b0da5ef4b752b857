"""`hicache conformance verify`: a published result file, checked by somebody else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from hicache_conformance.report.results import driver_files
from hicache_conformance.runner import verify

pytestmark = pytest.mark.slow(seconds=40)

VERIFY = ("conformance", "verify")
PACKAGE = "hicache_memory_driver"


@pytest.fixture(scope="module")
def published(site):
    """The report of a new driver."""
    ran = site.judge("memory --level core --profile smoke --seed 7")
    assert ran.status == 0, ran.output
    return ran.directory


@pytest.fixture
def copied(published, tmp_path):
    """Somebody else's copy of the report, which a test may alter."""
    return shutil.copytree(published, tmp_path / "copied")


def rewrite(report, **changes):
    """Alter values of a `results.json`; `a__0__b` is `b` of the first of `a`, and `GET-1` a rule."""
    file = report / "results.json"
    content = json.loads(file.read_text())
    numbers = {rule["id"]: str(number) for number, rule in enumerate(content["rules"])}
    for name, value in changes.items():
        rule = name.partition("__")[0]
        name = name.replace(rule, f"rules__{numbers[rule]}") if rule in numbers else name
        *path, last = (int(part) if part.isdigit() else part for part in name.split("__"))
        place = content
        for part in path:
            place = place[part]
        if value is None:
            del place[last]
        else:
            place[last] = value
    file.write_text(json.dumps(content))


def test_the_digest_is_what_sha256sum_says(site, published, results):
    """A reader needs no suite to check it."""
    (site.package / PACKAGE / "__pycache__").mkdir(exist_ok=True)
    said = subprocess.run(
        f"find {PACKAGE} -type f ! -name '*.pyc' | LC_ALL=C sort | xargs sha256sum | sha256sum",
        shell=True,
        cwd=site.package,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()[0]
    files = results(published)["driver"]["files"]
    assert files == {"packages": [PACKAGE], "count": 5, "sha256": said}


def test_the_same_run_exits_0(site, published):
    ran = site.hicache(*VERIFY, str(published / "results.json"))
    assert ran.status == 0, ran.output
    assert "the same: conformant again, with the same outcome of each of 35 rules" in ran.output
    assert "here" not in ran.output


@pytest.mark.long
def test_a_run_that_differs_exits_1(site, copied):
    rewrite(copied, **{"GET-1__outcome": "fail"})
    ran = site.hicache(*VERIFY, str(copied))
    assert ran.status == 1, ran.output
    assert "GET-1: fail in the file, pass here\ndifferent: 1 differences" in ran.output


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"verdict": "non-conformant"}, "verdict: non-conformant in the file, conformant here: "),
        ({"totals__pass": 31}, "totals.pass: 31 in the file, 30 here"),
        ({"driver__version": "0.9"}, "driver.version: hicache-memory-driver 0.9 in the file"),
        ({"driver__files__sha256": "0" * 64}, "driver.files: 5 files of"),
        ({"GET-1__id": "GET-99"}, "GET-99: pass in the file, nothing here"),
        (
            {"GET-1__outcome": "fail", "GET-1__reason": "GET-1: wrong"},
            "GET-1: fail in the file, pass here: GET-1: wrong",
        ),
        ({"GET-1__selected": False}, "GET-1: not selected in the file, pass here"),
        (
            {"GET-1__outcome_by_level": {"core": "untested"}},
            "GET-1: level core: untested in the file, pass here",
        ),
        # Of a file that contradicts itself.
        ({"GET-1__cases__0__outcome": "fail"}, ": fail in the file, pass here"),
    ],
)
def test_a_file_that_was_altered_differs(published, copied, changes, words):
    rewrite(copied, **changes)
    now = verify.read(published)
    assert any(words in line for line in verify.compare(verify.read(copied), now))
    assert verify.compare(now, now) == []


def test_other_versions_are_no_difference(published, copied):
    rewrite(copied, suite_version="0.0.1", environment__torch="2.6.0")
    assert verify.compare(verify.read(copied), verify.read(published)) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": 99}, "schema: is 99, and this suite reads 1; use the hicache-storage that"),
        ({"seed": None}, "Object missing required field `seed`; publish the file as"),
        ({"driver__files": None}, "missing required field `files` - at `$.driver`; publish"),
        ({"GET-1__outcome": "fine"}, "Invalid enum value 'fine' - at `$.rules["),
        ({"profile": "long"}, "profile: 'long' is none of smoke, default; use hicache"),
        ({"levels": ["heart"]}, "Invalid enum value 'heart' - at `$.levels["),
        ({"levels": []}, "levels: none; "),
        ({"replay__test_class": "tests.test_acme.TestAcme"}, "replay: it has not been written by"),
    ],
)
def test_a_file_that_cannot_be_repeated_says_why(copied, changes, words):
    rewrite(copied, **changes)
    with pytest.raises(ValueError, match=re.escape(words)):
        verify.read(copied)


@pytest.mark.parametrize(("text", "words"), [("{", "is no JSON"), ("[]", "schema: is None")])
def test_what_is_no_result_file_exits_2(site, tmp_path, text, words):
    (tmp_path / "results.json").write_text(text)
    ran = site.hicache(*VERIFY, str(tmp_path))
    assert ran.status == 2, ran.output
    assert words in ran.output


def test_nothing_of_a_file_is_executed_opened_or_imported(site, copied, tmp_path):
    touched = tmp_path / "touched"
    rewrite(
        copied,
        replay__services=[f"touch {touched}"],
        replay__options={"store": str(touched)},
        replay__interface="sglang",
        driver__name="antigravity:Driver",
    )
    ran = site.hicache(*VERIFY, str(copied))
    assert ran.status == 2, ran.output
    given = f"-c store={touched} --start-server 'touch {touched}' --interface sglang"
    assert (
        f"nothing was run: the run of the file was given what only you can give here: {given}"
        in (ran.output)
    )
    assert "--driver antigravity:Driver" in ran.output
    assert not touched.exists()


def test_what_the_caller_gives_is_run(copied):
    rewrite(copied, replay__services=["theirs"], replay__options={"store": "***"})
    published = verify.read(copied)
    settings = verify.settings_of(published, "", "", {"store": "mine"}, ["mine {port:a}"])
    assert (settings.driver, settings.config) == ("memory", {"store": "mine"})
    assert (settings.services, settings.seed) == (["mine {port:a}"], 7)


@pytest.mark.long
def test_a_run_of_some_cases_and_a_page_length_is_repeated_with_those(site):
    line = "memory --level core --profile smoke --case test_open --page-bytes 4KiB"
    ran = site.judge(line)
    assert ran.status == 1, ran.output
    assert ran.report["replay"]["cases"] == ["test_open"]
    ran = site.hicache(*VERIFY, str(ran.directory))
    assert ran.status == 0, ran.output
    assert "the same: incomplete again" in ran.output


# The digest
# ----------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in a namespace that others share."""
    home = tmp_path / "here"
    (home / "acme_space" / "store").mkdir(parents=True)
    (home / "acme_space" / "store" / "__init__.py").write_text("raise ImportError('imported')\n")
    (home / "acme_space" / "store" / "driver.py").write_text("A = 1\n")
    monkeypatch.syspath_prepend(str(home))
    return home / "acme_space" / "store"


def test_no_module_of_the_driver_is_imported_and_a_namespace_is_not_all_of_it(package):
    found = driver_files(["acme_space.store.driver:Acme", "acme_space.store.config:Config"])
    assert (found.packages, found.count) == (("acme_space.store",), 2)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("kernel.so", True),
        ("data/table.toml", True),
        ("__pycache__/driver.cpython-311.pyc", False),
        ("old.pyc", False),
        (".cache/state", False),
    ],
)
def test_which_files_count(package, name, counts):
    before = driver_files(["acme_space.store"])
    (package / name).parent.mkdir(exist_ok=True)
    (package / name).write_bytes(b"x")
    after = driver_files(["acme_space.store"])
    assert (after.sha256 != before.sha256, after.count - before.count) == (counts, counts)


def test_a_single_module_and_what_does_not_exist(tmp_path, monkeypatch):
    (tmp_path / "lone_driver.py").write_text("A = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = driver_files(["lone_driver:Lone", "lone_driver_of_nobody:Nobody"])
    assert (found.packages, found.count) == (("lone_driver",), 1)
    assert driver_files(["lone_driver_of_nobody"]).sha256 == ""
