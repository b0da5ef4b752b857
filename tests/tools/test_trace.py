"""`hicache bench --trace`: traces of each format, hits as the store has them, the plot."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest

from hicache_storage.tools.bench.client import Candidate, WrongAnswerError
from hicache_storage.tools.bench.trace import Trace, capacities_of, reference, replay
from tests.support.commands import run_here, run_hicache
from tests.tools.conftest import FAULTY

TRACES = Path(__file__).with_name("traces")
PAGE_BYTES = 4096


@pytest.mark.parametrize(
    ("name", "pages", "distinct", "hits"),
    [
        ("mooncake", 32, 14, 18),
        # Block 2 after 9 is another page than block 2 after 1.
        ("bailian", 13, 7, 6),
        ("dynamo", 11, 6, 5),
    ],
)
def test_each_format_gives_prefixes(name, pages, distinct, hits):
    trace = Trace.read(TRACES / f"{name}.jsonl")
    assert (len(trace.keys), len({*trace.keys.tolist()})) == (pages, distinct)
    assert reference(trace, PAGE_BYTES, None).hits == hits


def test_a_compressed_trace(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress((TRACES / "mooncake.jsonl").read_bytes()))
    assert Trace.read(path).requests == 10


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"hash_ids": "all"}', "line 1"),
        (b"hash_ids", "line 1"),
        (b'{"prompt": "Once"}', "no request with blocks"),
    ],
)
def test_another_form_is_refused(tmp_path, line, said):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(ValueError, match=said):
        Trace.read(path)


def test_lru_evicts_the_ends_of_old_prefixes_first():
    trace = Trace.read(TRACES / "mooncake.jsonl")
    hits = [reference(trace, PAGE_BYTES, pages * PAGE_BYTES).hits for pages in range(15)]
    assert hits[0] == 0
    assert hits == sorted(hits)
    # The whole trace fits.
    assert hits[14] == reference(trace, PAGE_BYTES, None).hits
    # 1 2 3, then 1 2 4 with room for three pages: the first two are delivered, 3 has gone.
    first = Trace(trace.keys[:6], trace.ends[:3])
    assert reference(first, PAGE_BYTES, 3 * PAGE_BYTES).hits == 2


def test_a_sample_has_the_hit_rates_of_the_whole():
    # Conversations that grow by a page each turn, taken up again in a fixed disorder. All begin
    # with the same four pages, of which a sample may have none.
    turns = [(7 * number % 500, number // 500 + 1) for number in range(5000)]
    pages = [
        place
        for talk, length in turns
        for place in [*range(4), *((talk, page) for page in range(length))]
    ]
    trace = Trace(
        np.array([hash((place, 1)) % (1 << 62) for place in pages]),
        np.cumsum([0] + [4 + length for _, length in turns]),
    )
    sample = trace.sampled(8)
    assert sample.requests == 5000
    assert {*sample.keys.tolist()} == {key for key in trace.keys.tolist() if key % 8 == 0}
    for room in (1600, 3200, 4000, None):
        whole = reference(trace, PAGE_BYTES, room and room * PAGE_BYTES)
        part = reference(sample, PAGE_BYTES, room and room // 8 * PAGE_BYTES)
        scaled = part.scaled(8, len(pages), PAGE_BYTES, None)
        assert scaled.hit_rate == pytest.approx(whole.hit_rate, abs=0.04)
        assert scaled.read_bytes == scaled.hits * PAGE_BYTES
        assert scaled.written_bytes == pytest.approx(whole.written_bytes, rel=0.12)


@pytest.mark.parametrize("driver", ["file", "dictionary"])
def test_a_store_with_room_delivers_all_that_any_can(site, tmp_path, driver):
    site.here("dictionary")
    trace = Trace.read(TRACES / "mooncake.jsonl")
    options = {"path": str(tmp_path / "store")} if driver == "file" else {}
    for _ in range(2):
        # The second replay finds none of the pages of the first.
        result = replay(trace, Candidate(driver, options), PAGE_BYTES, None)
        best = reference(trace, PAGE_BYTES, None)
        assert (result.hits, result.read_bytes) == (best.hits, best.read_bytes)
        assert result.written_bytes == best.written_bytes
        assert result.seconds > 0


def test_a_wrong_page_is_no_result(site):
    site.here("lies", FAULTY["lies"])
    with pytest.raises(WrongAnswerError, match="another page"):
        replay(Trace.read(TRACES / "mooncake.jsonl"), Candidate("lies"), PAGE_BYTES, None)


def test_a_failed_deletion_leaves_no_open_storage(site):
    site.here(
        "stubborn",
        "closed = 0\n"
        "def delete(self, keys, *, pool='kv'): raise RuntimeError('no deletion')\n"
        "def disconnect(self): type(self).closed += 1",
    )
    trace = Trace.read(TRACES / "mooncake.jsonl")
    with pytest.raises(RuntimeError, match="no deletion"):
        replay(trace, Candidate("stubborn"), PAGE_BYTES, None)
    assert sys.modules["driver_stubborn"].Storage.closed == 1


def test_capacities(site):
    site.here("dictionary")
    trace = Trace.read(TRACES / "mooncake.jsonl")
    mebi = 1 << 20
    assert capacities_of(trace, "file", mebi, None) == [mebi, int(1.4 * mebi), int(4.2 * mebi)]
    assert capacities_of(trace, "file", 4096, "2GiB,1GiB") == [1 << 30, 2 << 30]
    assert capacities_of(trace, "dictionary", 4096, None) == [None]
    with pytest.raises(ValueError, match="leave --capacity out"):
        capacities_of(trace, "dictionary", 4096, "1GiB")


def test_hit_rates_of_a_store_without_a_capacity_are_no_plot(site, tmp_path):
    site.here("dictionary")
    trace, plot = str(TRACES / "mooncake.jsonl"), tmp_path / "plot.svg"
    done = run_here("bench", "dictionary", "--trace", trace, "--plot", str(plot))
    assert done.exit_code == 2
    assert "leave --plot out" in done.stderr
    assert not plot.exists()


def test_the_command_has_a_table_a_plot_and_results(tmp_path):
    trace = ("--trace", TRACES / "mooncake.jsonl", "--capacity", "4MiB,8MiB")
    made = ("--plot", tmp_path / "plot.svg", "--json", tmp_path / "results.json")
    done = run_hicache("bench", "file", *trace, *made)
    assert done.returncode == 0, done.stderr
    assert "10 requests, 32 pages of 4.0 KiB" in done.stdout
    assert done.stdout.count("56.2%") == 5
    results = msgspec.json.decode((tmp_path / "results.json").read_bytes())
    assert [one["label"] for one in results] == ["file", "LRU", "file", "LRU", "LRU"]
    assert {one["hits"] for one in results} == {18}
    drawing = ElementTree.parse(tmp_path / "plot.svg").getroot()
    assert len([shape for shape in drawing.iter() if shape.tag.endswith("polyline")]) == 2
