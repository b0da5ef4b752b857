"""The tier under vLLM's own interface, without an engine: jobs, misses, resets, memory."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext

from hicache_conformance.interfaces.vllm_tier.storage import offloading_config
from hicache_storage.engines.vllm import HiCacheTier
from hicache_storage.engines.vllm.tier import build_of
from hicache_storage.spec import seconds_since_asked
from tests.interop.drivers import SEEN, STORES, raise_os_error
from tests.interop_vllm.tier_engine import USED, Engine, keys
from tests.support.waiting import eventually

pytestmark = pytest.mark.vllm


@pytest.fixture
def engine(tmp_path):
    made = Engine(tmp_path)
    yield made
    made.close()


@pytest.fixture
def sample(tmp_path, trouble):
    made = Engine(tmp_path, driver="sample", driver_config={})
    yield made
    made.close()


def test_what_is_stored_is_found_and_loaded_into_other_chunks(engine, tmp_path):
    contents = [engine.fill(chunk, chunk) for chunk in range(4)]
    assert engine.found(keys(6)) == [False] * 6
    stored = engine.store(keys(4), [0, 1, 2, 3])
    assert stored.success
    assert stored.transfer_bytes == 4 * USED
    engine.tier.on_request_finished(engine.request())
    other = Engine(tmp_path)
    for each in (engine, other):
        assert each.found(keys(6)) == [True] * 4 + [False] * 2
        assert each.load(keys(4), [9, 8, 7, 6]).success
        assert [each.bytes_of(chunk) for chunk in (9, 8, 7, 6)] == contents
    other.close()


def test_a_load_keeps_what_was_delivered_and_marks_the_rest_as_misses(sample):
    content = sample.fill(0, 1)
    wanted, request = keys(2), sample.request("asks")
    assert sample.store(wanted, [0, 1]).success
    assert sample.found(wanted, request) == [True, True]
    del STORES["default"][list(STORES["default"])[1]]
    result = sample.load(wanted, [3, 4], request)
    assert not result.success
    assert list(result.successful_keys) == [wanted[0]]
    assert sample.bytes_of(3) == content
    assert sample.tier.lookup(wanted[0], request) is LookupResult.HIT
    assert sample.tier.lookup(wanted[1], request) is LookupResult.MISS


@pytest.mark.parametrize("groups", [(0, 1), (0, 2), (3, 5)])
def test_groups_have_pools_of_their_own(tmp_path, groups):
    """Whatever their numbers: vLLM leaves out groups that are not prefix cacheable."""
    engine = Engine(tmp_path, groups=groups)
    first, second = engine.fill(0, 1), engine.fill(1, 2)
    both = [key for group in groups for key in keys(1, group=group)]
    assert engine.store(both, [0, 1]).success
    assert engine.found([*both, *keys(1, group=groups[1], start=3)]) == [True, True, False]
    assert engine.load(both, [5, 6]).success
    assert (engine.bytes_of(5), engine.bytes_of(6)) == (first, second)
    assert set(engine.tier.storage.get_stats().pools) == {"kv", f"group_{groups[1]}"}
    engine.close()


def test_heads_of_chains_are_younger_than_their_tails(sample):
    request, chain = sample.request(), keys(4)
    for number, key in enumerate(chain):
        request.set_offload_key_position(key, 16 * (number + 1))
    # The device has the first two; vLLM names them all, and has the others stored.
    sample.tier.touch(chain, request)
    assert sample.result(sample.submit(chain[2:], [0, 1], load=False, request=request)).success
    asked = [prefix for operation, prefix, _ in SEEN if operation == "set"]
    assert asked == [[key[:-4].hex() for key in chain[:2]]]


def test_after_a_reset_nothing_is_served_or_stored(engine):
    engine.fill(0, 1)
    assert engine.store(keys(1), [0]).success
    engine.tier.drain_jobs()
    assert engine.found(keys(1)) == [False]
    assert not engine.load(keys(1), [1]).success
    assert not engine.store(keys(1, start=5), [0]).success


def test_a_reset_of_an_engine_that_keeps_its_weights_changes_nothing(tmp_path):
    engine = Engine(tmp_path, on_reset="keep")
    engine.fill(0, 1)
    job = engine.submit(keys(1), [0], load=False)
    engine.tier.drain_jobs()
    [result] = engine.tier.get_finished_jobs()
    assert (result.job_id, result.success) == (job, True)
    assert engine.found(keys(1)) == [True]
    engine.close()


def test_a_storage_that_raises_is_a_miss(tmp_path, trouble):
    engine = Engine(tmp_path, driver="unruly", driver_config={})
    trouble.at("exists", "get", "set", answer=raise_os_error)
    assert engine.found(keys(2)) == [False, False]
    assert not engine.store(keys(1), [0]).success
    assert not engine.load(keys(1), [0]).success
    assert engine.tier.refused_calls == 3
    engine.close()


def test_lookups_behind_a_hung_one_have_waited_since_they_were_asked_for(engine, monkeypatch):
    """vLLM has one thread for them all: each would have a deadline of its own, one after another."""
    waited, hung, go_on = list[float](), threading.Event(), threading.Event()

    def present(texts, **_: object):
        waited.append(seconds_since_asked())
        hung.set()
        assert go_on.wait(60)
        return [False] * len(texts)

    monkeypatch.setattr(engine.tier.storage, "batch_present", present)
    requests = [engine.request(name) for name in ("first", "second")]
    for request, key in zip(requests, keys(2), strict=True):
        # Asked for in two steps, as two requests that come one after the other.
        assert engine.tier.lookup(key, request) is LookupResult.RETRY
        engine.tier.on_schedule_end(ScheduleEndContext([], []))
        assert hung.wait(60)
    asked = time.monotonic()
    while (released := time.monotonic()) <= asked + 0.01:
        pass
    go_on.set()
    for request, key in zip(requests, keys(2), strict=True):
        assert engine.found([key], request) == [False]
    assert waited[1] >= released - asked
    # A request that comes later has waited for less, however long the engine was idle.
    later = time.monotonic()
    assert engine.found(keys(3)[2:], engine.request("third")) == [False]
    assert waited[2] <= time.monotonic() - later


def test_loads_behind_hung_ones_are_misses_at_their_deadline(tmp_path, monkeypatch):
    engine = Engine(tmp_path, threads=1)
    hung, go_on = threading.Event(), threading.Event()

    def get(transfers, extra_info):
        hung.set()
        assert go_on.wait(60)
        return {transfer.name: [True] * len(transfer.keys) for transfer in transfers}

    monkeypatch.setattr(engine.tier.storage, "batch_get_v2", get)
    first = engine.submit(keys(1), [0], load=True)
    assert hung.wait(60)
    # Only for the one that waits: a busy machine may begin a load later than that.
    engine.tier._loads._deadline_seconds = 0.1
    assert not engine.result(engine.submit(keys(1), [1], load=True)).success
    assert engine.tier.refused_calls == 1
    go_on.set()
    assert engine.result(first).success
    engine.close()


def taken(engine: Engine, count: int = 1) -> list[tuple[list[bytes], bool]]:
    """The keys of so many events, and whether they are removed."""
    events = []

    def enough() -> bool:
        events.extend(engine.tier.take_events())
        return len(events) >= count

    eventually(enough)
    # It has work until then, so that vLLM takes them.
    eventually(lambda: not engine.tier.has_pending_work())
    return [(event.keys, event.removed) for event in events]


def test_stored_chunks_are_published_where_vllm_publishes_events(tmp_path):
    engine = Engine(tmp_path, enable_kv_events=True, locality="REMOTE")
    engine.store(keys(2), [0, 1])
    assert engine.tier.has_pending_work()
    [event] = engine.tier.take_events()
    assert (event.keys, event.removed, event.locality.value) == (keys(2), False, "REMOTE")
    # vLLM keeps the tokens of the chunks until then.
    assert event.removal_expected
    # They are known already.
    assert engine.store(keys(2), [0, 1]).success
    assert engine.load(keys(1), [2]).success
    assert list(engine.tier.take_events()) == []
    engine.close()


def test_chunks_that_another_engine_removes_are_published(tmp_path):
    """Each group's own: their keys are the same."""
    engine = Engine(tmp_path, groups=(3, 5), enable_kv_events=True)
    first, second = keys(2, group=3), keys(2, group=5)
    engine.store([*first, *second], [0, 1, 2, 3])
    assert taken(engine) == [([*first, *second], False)]
    other = Engine(tmp_path, groups=(3, 5))
    other.tier.storage.delete([second[0][:-4].hex()], pool="group_5")
    assert taken(engine) == [([second[0]], True)]
    other.close()
    engine.close()


def test_chunks_that_are_missed_are_published_as_removed(tmp_path, trouble):
    """Of a driver that reports no removals."""
    engine = Engine(tmp_path, driver="sample", driver_config={}, enable_kv_events=True)
    engine.store(keys(3), [0, 1, 2])
    assert taken(engine) == [(keys(3), False)]
    names = list(STORES["default"])
    del STORES["default"][names[0]], STORES["default"][names[1]]
    assert engine.found(keys(1)) == [False]
    assert taken(engine) == [(keys(1), True)]
    assert not engine.load(keys(3)[1:], [3, 4]).success
    assert taken(engine) == [(keys(3)[1:2], True)]
    engine.close()


@pytest.mark.parametrize(("on_reset", "again"), [("miss", []), ("keep", [(keys(2), False)])])
def test_after_a_reset_listeners_know_what_is_served(tmp_path, on_reset, again):
    """vLLM clears what they know, or has not been able to."""
    engine = Engine(tmp_path, on_reset=on_reset, enable_kv_events=True)
    engine.store(keys(2), [0, 1])
    assert taken(engine) == [(keys(2), False)]
    engine.tier.drain_jobs()
    assert taken(engine, 1 + len(again)) == [(keys(2), True), *again]
    engine.close()


def test_metrics_are_what_has_changed_since_the_last_report(engine):
    engine.store(keys(2), [0, 1])
    written = "hicache_storage_written_pages_total"
    declared = HiCacheTier.build_metric_definitions({})

    def reported():
        return engine.tier.get_stats().data

    first, second = reported(), reported()
    values = next(
        part for part in first.values() if written in part and isinstance(part[written], dict)
    )
    assert values[written] == {("file", "kv"): 2.0}
    assert not any(
        written in part for part in second.values() if isinstance(part.get(written), dict)
    )
    for name, series in values.items():
        for labels in series:
            assert len(labels) == len(declared[name].labelnames)
            # vLLM refuses to send subclasses of texts to its API server.
            assert {type(label) for label in labels} == {str}


def test_the_format_of_the_canonical_layout_is_named_where_it_is_on():
    config = offloading_config(worker_bytes=USED)
    formats = [
        build_of(replace(config, canonical_layout=True, kv_cache_layout=layout))["canonical_format"]
        for layout in ("LBHNC", "LBNHC")
    ]
    assert len(set(formats)) == len(formats)
    assert "canonical_format" not in build_of(config)
