"""The driver: what is recycled, damaged, torn, refused."""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec import structs

from hicache_metadata_server import protocol as p
from hicache_metadata_server.cli.options import AdminClient
from hicache_storage import create_storage
from hicache_storage.objects import Call
from hicache_storage.spec import (
    ConfigError,
    PoolTransfer,
)
from hicache_storage.testing import BytePool
from tests.backends.file.harness import identity
from tests.backends.hf3fs.forwards import Forward, Manner
from tests.backends.hf3fs.harness import chain, content, interrupted, recycle
from tests.metadata_server import servers
from tests.support.metadata import HttpClient, Served
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow(seconds=20)

PATIENCE_SECONDS = 60.0


def test_a_set_over_several_pools_asks_two_requests(rig):
    one, keys = rig(), chain("a", 4)
    one.storage.register_mem_host_pool_v2(BytePool(page_size=4), "mamba")
    indices = torch.arange(16, dtype=torch.int64)

    def put(keys):
        transfers = [
            PoolTransfer(pool, keys=keys, host_indices=indices[: 4 * len(keys)])
            for pool in ("kv", "mamba")
        ]
        with interrupted(one.store.metadata, "send") as sent:
            answers = one.storage.batch_set_v2(transfers)
        assert answers == dict.fromkeys(("kv", "mamba"), [True] * len(keys))
        return [path for path, *_ in sent]

    assert put(chain("b", 1))[0] == "/v2/initialize"
    assert put(keys[:2]) == ["/v2/reserve", "/v2/commit"]
    assert put(keys[:2]) == ["/v2/reserve"]
    assert put(keys) == ["/v2/reserve", "/v2/commit"]
    assert one.storage.get_stats().pools["kv"].pages_written == 5


@pytest.mark.parametrize("times", [1, 3])
def test_a_page_whose_slot_was_given_away_is_a_miss_and_no_damage(rig, times):
    """D2: between the lookup and the read, every slot is recycled; at every attempt but one, too."""
    reader, writer, keys = rig(file_size="64KiB"), rig(file_size="64KiB"), chain("a", 8)
    assert all(writer.put(keys))

    def again():
        recycle(writer, keys)
        # They are there again, in other slots, which are recycled in their turn.
        if times > 1:
            eventually(lambda: all(writer.put(keys)))

    with interrupted(reader.store.engine, "read", again, times=times) as calls:
        found = reader.get(keys)
    assert calls
    right = [content(key, 0, reader.page_bytes) for key in keys]
    assert all(page in (None, wanted) for page, wanted in zip(found, right, strict=True))
    assert times > 1 or found == [None] * 8
    stats = reader.storage.get_stats()
    assert stats.pools["kv"].pages_damaged == 0
    assert stats.faults == 0


def test_a_page_that_has_moved_is_read_from_where_it_is(rig):
    one, other, keys = rig(), rig(), chain("a", 4)
    assert all(one.put(keys))

    def move():
        slots = {one.slot(key) for key in keys}
        other.storage.delete(keys)
        # They land elsewhere: what they had rests, or is overwritten here.
        assert all(other.put(keys, version=1))
        for slot in slots - {one.slot(key) for key in keys}:
            one.overwrite(slot, b"\0" * one.file.slot_bytes)

    with interrupted(one.store.engine, "read", move):
        one.expect(keys, version=1)


def test_sets_that_wait_for_a_quarantine_are_refused_with_what_a_file_takes_for_long(
    tmp_path, rig, caplog
):
    caplog.set_level("INFO")
    with Served(command=f"{servers.SERVE} --quarantine-seconds 600") as served:
        one = rig(metadata_url=served.url, file_size=20 * 4608, wait_seconds=0.0)
        assert all(one.put(chain("a", 20)))
        takes = "it takes 0.0167 pages/s (7.68e-05 MB/s) for long"
        assert takes in caplog.text
        assert "a full file takes 7.68e-05 MB/s for long" in one.storage.health().detail
        caplog.clear()
        assert one.put(chain("b", 2)) == [False, False]
        stats = one.storage.get_stats()
        assert (stats.faults, stats.pools["kv"].pages_refused) == (0, 2)
        assert takes in caplog.text
        health = one.storage.health()
        assert (health.ok, health.writable) == (True, False)
        assert takes in health.detail


def test_a_write_that_comes_too_late_is_not_published(rig):
    one, keys = rig(), chain("a", 2)
    with (
        interrupted(one.store.engine, "write", lambda: time.sleep(0.4), late=True),
        interrupted(one.store.metadata, "commit") as commits,
    ):
        assert one.put(keys, seconds=0.3) == [False, False]
    assert commits == []
    assert one.hit(keys) == 0
    eventually(lambda: all(one.put(keys)))
    one.expect(keys)


def test_a_lost_lease_is_a_fault_that_is_counted(rig, caplog):
    one, keys = rig(lease_seconds=0.2), chain("a", 2)
    with interrupted(one.store.engine, "write", lambda: time.sleep(0.5), times=99, late=True):
        assert one.put(keys) == [False, False]
    assert one.storage.fault_count() == 1
    assert "2 leases ended before their pages were stored" in caplog.text
    # A busy machine takes longer than the fifth of a second.
    one.store.config = structs.replace(one.store.config, lease_seconds=60.0)
    assert one.put(keys) == [True, True]
    assert one.storage.fault_count() == 1


def test_a_set_pauses_only_where_it_waits(rig, monkeypatch):
    """For pages that others are writing, or slots that rest; not when its own pages are done."""
    from hicache_backends.hf3fs import writer

    pauses, begin = [], time.monotonic()
    clock = SimpleNamespace(sleep=pauses.append, monotonic=lambda: begin + sum(pauses))
    monkeypatch.setattr(writer, "time", clock)
    one = rig()
    assert all(one.put(chain("a", 4)))
    assert all(one.put(chain("a", 6)))
    assert pauses == []
    asked = p.ReserveScope(scope=one.file.scope, keys=chain("b", 1))
    one.store.metadata.reserve([asked], Call(5), lease_seconds=60.0)
    assert one.put(chain("b", 1)) == [False]
    assert sum(pauses) == pytest.approx(1.0, abs=0.2)


def test_slow_writes_renew_their_leases(rig, monkeypatch):
    from hicache_backends.hf3fs import writer

    one, keys = rig(lease_seconds=3.2), chain("a", 4)
    monkeypatch.setattr(writer, "CHUNK_BYTES", 2 * 4160)
    real, ends = one.store.engine.write, []

    def slow(jobs, call):
        real(jobs, call)
        ends.append(jobs[0].until)
        while jobs[0].until - time.monotonic() > 1.5:
            time.sleep(0.01)

    one.store.engine.write = slow
    assert all(one.put(keys))
    assert len(ends) == 2
    assert ends == sorted(set(ends)), "each chunk has a lease that ends later"
    one.expect(keys)


def test_people_are_told_whose_pages_a_file_has(rig):
    writer, keys = rig(), chain("a", 2)
    assert all(writer.put(keys))
    [slots] = Path(writer.store.path).glob("*.slots")
    about = slots.with_suffix(".json")
    told = json.loads(about.read_text())
    assert (told["pool"], told["identity.model"]) == ("kv", writer.storage.identity.model)
    about.unlink()
    about.mkdir()
    rig().expect(keys)


def test_a_file_that_was_removed_is_made_anew(rig, monkeypatch):
    from hicache_backends.hf3fs.slots import files

    monkeypatch.setattr(files, "POLL_SECONDS", 0.0)
    one, other, keys = rig(), rig(), chain("a", 2)
    assert all(one.put(keys))
    os.unlink(one.file.path)
    assert one.get(keys) == [None, None]
    assert all(one.put(keys))
    other.expect(keys)


def test_a_directory_that_was_emptied_has_another_file_for_another_map(
    rig, server_two, tmp_path, monkeypatch
):
    """Two maps of one file give out its slots twice: acknowledged pages would be overwritten."""
    from hicache_backends.hf3fs.slots import files

    monkeypatch.setattr(files, "POLL_SECONDS", 0.0)
    a, before, store = rig(), chain("a", 5), tmp_path / "store"
    assert all(a.put(before))
    for path in store.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    b, more, others = rig(metadata_url=server_two.url), chain("b", 20), chain("c", 20)
    for start in range(0, 20, 5):
        assert all(a.put(more[start : start + 5]))
        assert all(b.put(others[start : start + 5]))
    a.expect(more)
    b.expect(others)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"file_size": 0}, "file_size"),
        ({"metadata_url": "meta:18000"}, "metadata_url: 'meta:18000' is no"),
        ({"metadata_url": "http://a:1,b:1"}, "metadata_url: 'b:1' is no"),
        ({"metadata_url": "http://a:1,"}, "metadata_url: '' is no"),
        ({"metadata_url": "http://a:none"}, "metadata_url: 'http://a:none' is no"),
        (
            {"metadata_url": ["http://a:1", "http://b:1", "http://a:1/"]},
            "metadata_url: 'http://a:1' is named twice",
        ),
        ({"metadata_url": "http://a:1, http://a:1"}, "metadata_url: 'http://a:1' is named twice"),
        ({}, "metadata_url is missing.*hicache metadata serve"),
        ({"metadata_url": []}, "metadata_url is missing.*hicache metadata serve"),
        ({"metadata_url": ["http://a:1", 2]}, "metadata_url"),
        ({"engine": "magic"}, "engine"),
        ({"metadata_url": "http://me:secret@meta:18000"}, "meta:18000' is given with a user"),
    ],
)
def test_bad_options_are_named_and_no_password_is(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message) as refused:
        create_storage("hf3fs", identity(), {"path": str(tmp_path), **options})
    assert "secret" not in str(refused.value)


def test_a_server_that_takes_no_changes_is_no_store_for_sets(rig, server):
    one, keys = rig(metadata_url=server.url), chain("a", 4)
    assert all(one.put(keys))
    assert one.storage.health().writable
    AdminClient(server.url).call("/v2/drain", p.Drain(enabled=True), p.Draining)
    health = one.storage.health()
    assert (health.ok, health.writable) == (True, False)
    assert "this server drains" in health.detail
    one.expect(keys)


def test_a_server_that_is_left_is_counted_and_is_no_fault(rig, kept_server):
    with (
        closing(Forward(kept_server.port)) as one_way,
        closing(Forward(kept_server.port)) as other_way,
    ):
        one = rig(metadata_url=f"{one_way.url}, {other_way.url}/")
        keys = chain("a", 8)
        assert all(one.put(keys))
        # Whichever it uses.
        for way in (one_way, other_way):
            way.manner = Manner.REFUSES
            one.expect(keys)
            way.manner = Manner.WELL
        stats = one.storage.get_stats()
        assert (stats.failovers >= 1, stats.faults) == (True, 0)
        assert one.storage.health().ok


def test_a_storage_names_its_model_once(rig, server):
    one = rig(metadata_url=server.url)
    assert all(one.put(chain("a", 8)))
    labels = f'model="{identity().model}",scope="{one.file.scope}"'
    series = f"hicache_metadata_scope_info{{{labels}}} 1.0".encode()
    client = HttpClient(server.url)
    eventually(lambda: series in client.get("/metrics").body)
    one.expect(chain("a", 8))
    described = b'hicache_metadata_requests_total{route="/v2/describe",status="204"} 1.0'
    assert described in client.get("/metrics").body


def test_a_namespace_that_was_emptied_just_now_is_removed_by_one_request(rig):
    """Each is a line in the audit log: polling for the end of the quarantine wrote fifty."""
    one, keys = rig(), chain("a", 4)
    assert all(one.put(keys))
    assert one.storage.delete(keys) == [True] * 4
    with interrupted(one.store.metadata, "drop") as drops:
        assert one.storage.remove_pools(30.0)
    assert len(drops) == 1
