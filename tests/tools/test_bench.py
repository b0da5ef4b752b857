"""`hicache bench`: right figures, wrong answers, stores without room, removal of all pages."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from hicache_storage.spec import StorageRefusedError, UnsupportedOperationError
from hicache_storage.tools.bench.client import (
    BenchWorkload,
    Candidate,
    ClientPool,
    WrongAnswerError,
    run_sweep,
)
from hicache_storage.tools.bench.results import CandidateInfo, Measurement, Operation, percentile
from tests.metadata_server.full_disks import small_disk
from tests.support.commands import run_here, run_hicache
from tests.tools.conftest import FAULTY

pytestmark = pytest.mark.slow(seconds=60)

TRACE = str(Path(__file__).with_name("traces") / "mooncake.jsonl")
OF_TEBIBYTES = ("--capacity", "1000TiB", "--pages", "1TiB")
QUICK = ("--pages", "4KiB", "--batch", "8", "--seconds", "0.05", "--max-stored", "1MiB")


def bench(*arguments):
    return run_hicache("bench", *arguments)


def sweep(candidate, *, clients=(1,)):
    workloads = [BenchWorkload(4096, count, 8) for count in clients]
    return run_sweep(candidate, workloads, seconds=0.05, max_stored_bytes=1 << 20)


def file_store(directory, **options):
    return Candidate("file", {"path": str(directory / "store"), **options})


def stored_pages(directory):
    """Files that may hold a page; the file driver's logs of events and removals hold none."""
    logs = (".events", ".removals")
    files = [path for path in directory.rglob("*") if path.is_file() and path.suffix not in logs]
    return [path for path in files if path.stat().st_size >= 4096]


def test_every_cell_is_measured_and_nothing_stays(tmp_path):
    report = sweep(file_store(tmp_path), clients=(1, 2))
    assert [(m.clients, m.operation) for m in report.measurements] == [
        (clients, op) for clients in (1, 2) for op in Operation
    ]
    for measure in report.measurements:
        assert min(measure.rounds) > 0
        assert 0 < measure.p50_us <= measure.p95_us <= measure.p99_us <= measure.max_us
        assert measure.calls >= len(measure.rounds) * measure.clients
    assert report.candidates == [
        CandidateInfo("file", "file", {"path": str(tmp_path / "store")}, verifies_checksums=True)
    ]
    assert not stored_pages(tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("breaks", "a set of 8 pages"),
        ("forgets", "exists finds 0"),
        ("misses", "a get of 8 pages"),
        ("lies", "delivered other bytes"),
    ],
)
def test_a_wrong_answer_is_no_result(site, name, said):
    site.here(name, FAULTY[name])
    with pytest.raises(WrongAnswerError, match=said):
        sweep(Candidate(name))


def test_the_command_says_what_was_wrong(site, tmp_path):
    site.add("lies", FAULTY["lies"])
    done = bench("lies", *QUICK, "--concurrency", "1", "--json", str(tmp_path / "result.json"))
    assert done.returncode == 1, done.stdout
    assert "wrong answer: a get answered True and delivered other bytes" in done.stderr
    assert not (tmp_path / "result.json").exists()


def test_a_driver_that_cannot_remove_its_pages(site):
    site.here("append", capabilities="may_hang=False")
    with pytest.raises(UnsupportedOperationError, match="its pages would stay"):
        sweep(Candidate("append"))


def test_a_store_that_refuses_pages_is_no_wrong_answer(site, tmp_path):
    site.here("refuses", FAULTY["refuses"])
    with pytest.raises(StorageRefusedError, match=r"sets are refused: .*No space left"):
        sweep(Candidate("refuses"))
    with pytest.raises(StorageRefusedError, match=r"[1-8] were refused, 0 were evicted"):
        sweep(file_store(tmp_path, capacity="16KiB"))
    with small_disk(tmp_path, "100k") as disk:
        with pytest.raises(StorageRefusedError, match="give a smaller --max-stored"):
            sweep(file_store(disk.path, min_free="0"), clients=(4,))
        assert not stored_pages(disk.path)
    assert not stored_pages(tmp_path)


def test_a_store_that_evicts_pages_is_no_wrong_answer(tmp_path):
    store, batches = file_store(tmp_path, capacity="64KiB"), range(4)
    with closing(ClientPool(store, BenchWorkload(4096, 1, 8), "run")) as pool:
        pool.prepare(batches)
        pool.run(Operation.WRITE, batches)
        with pytest.raises(StorageRefusedError, match=r"0 were refused, \d+ were evicted"):
            pool.run(Operation.EXISTS, batches)


# Results
# -------------------------------------------------------------------------------------------------------------


def measure(rounds=(100.0, 300.0, 200.0), operation=Operation.READ):
    made = Measurement("x", 1 << 20, 1, operation, 128, list(rounds))
    made.set_latencies([0.001 * number for number in range(1, 101)])
    return made


def test_percentiles():
    values = [float(number) for number in range(1, 101)]
    found = [percentile(values, share) for share in (0.5, 0.95, 0.99, 1.0)]
    assert found == [50.0, 95.0, 99.0, 100.0]
    assert percentile([7.0], 0.5) == 7.0


def test_rates_have_units():
    assert measure().rates() == pytest.approx(
        (200 * 1.048576e-3, 100 * 1.048576e-3, 300 * 1.048576e-3)
    )
    assert measure(operation=Operation.EXISTS, rounds=(2e3,)).rates() == pytest.approx(
        (2.0, 2.0, 2.0)
    )
    assert measure().p95_us == pytest.approx(95_000)


# The command
# ---------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path):
    result, store = str(tmp_path / "r.json"), f"path={tmp_path / 'store'}"
    done = bench("file", *QUICK, "--concurrency", "1", "-c", store, "--json", result)
    assert done.returncode == 0, done.stderr
    assert "checksums verified" in done.stdout
    answer = json.loads((tmp_path / "r.json").read_text())
    assert answer["schema"] == 2
    assert [one["operation"] for one in answer["measurements"]] == ["write", "exists", "read"]
    assert all(min(one["rounds"]) > 0 for one in answer["measurements"])
    assert not stored_pages(tmp_path / "store")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fiel"], "no driver named 'fiel'"),
        (["file", "--concurrency", "x"], "is no list of numbers"),
        (["file", "--concurrency", "0"], "--concurrency begins at 1"),
        (["file", "--pages", "big"], "is not a size"),
        (["file", "--pages", "4096,5000"], "multiples of 4096 bytes"),
        (["file", "--pages", "64MiB"], "more than --max-stored 2.0 GiB"),
        (["file", "-c", "paht=x"], "did you mean 'path'?"),
        (["file", "--capacity", "1GiB"], "need a --trace"),
        (["file", "--sample", "8"], "need a --trace"),
        (["file", "--trace", "t.jsonl", "--pages", "1KiB"], "multiples of 4096 bytes"),
        (["file", "--trace", "gone.jsonl"], "gone.jsonl"),
        (["file", "--trace", TRACE, "--sample", "4096"], "a smaller N"),
        (["file", "--trace", TRACE, *OF_TEBIBYTES], "smaller --pages"),
    ],
)
def test_bad_arguments(arguments, said):
    done = run_here("bench", *arguments)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
