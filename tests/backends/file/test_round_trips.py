"""How calls become bundles: their number, order, threads, copies, direct reads and syncs."""

from __future__ import annotations

import errno
import json
import os
import threading

import pytest

from hicache_backends.file import reader as reader_module
from hicache_backends.file import store as store_module
from hicache_backends.file import writer as writer_module
from hicache_backends.posix.directories import Mount
from hicache_storage.objects import Call
from hicache_storage.spec import CancellationToken
from tests.backends.file.harness import chain, failing, identity, interrupted


@pytest.mark.parametrize(
    "components",
    [
        (1,),
        (600_000,),
        (300_000, 300_001),
        (700_000, 5, 1_000_000),
        (7,) * 1500,
        (4096,) * 300,
        (262_144,),
        (524_288, 524_288),
    ],
    ids=lambda components: f"{len(components)}x{components[0]}",
)
@pytest.mark.parametrize("way", ["in memory", "cached", "buffered", "unverified"])
def test_pages_of_any_size_and_number_of_components(rig, monkeypatch, components, way):
    kind = "tmpfs" if way == "in memory" else "ext4"
    monkeypatch.setattr(store_module, "mount_of", lambda path: Mount(kind))
    if way in ("buffered", "unverified"):
        monkeypatch.setattr(reader_module, "is_cached", lambda *_: False)
    options = {"pages": 5, "components": components, "verify_checksums": way != "unverified"}
    a, b, keys = rig(**options), rig(**options), chain("a", 5)
    assert a.put(keys) == [True] * 5
    assert b.holds(keys)
    assert b.holds([*keys[2:4], *keys[1::-1], keys[3]])
    assert b.versions([keys[3], "missing", keys[0]]) == [0, None, 0]


def test_a_large_batch_becomes_several_bundles_in_the_order_of_its_chain(rig, monkeypatch):
    monkeypatch.setattr(writer_module, "MAX_BUNDLE_BYTES", 40_000)
    monkeypatch.setattr(writer_module, "MIN_BUNDLE_BYTES", 20_000)
    before = set(threading.enumerate())
    monkeypatch.setattr(store_module, "LOCAL_THREADS", 3)
    a, keys = rig(), chain("a", 64)
    a.store.reader.bytes_per_thread = 50_000
    assert a.put(keys) == [True] * 64
    assert len(a.bundles()) == 8
    assert a.holds(keys)
    # The caller is the third, and an idle thread is used before another is started.
    started = [thread.name for thread in set(threading.enumerate()) - before]
    assert 1 <= started.count("hicache-file") <= 2
    in_chain = dict.fromkeys(a.page_index.pages[key][0].path for key in keys)
    times = [os.stat(path).st_mtime_ns for path in in_chain]
    assert times == sorted(set(times), reverse=True)
    assert rig().holds(keys)


def test_a_clear_stops_once_the_call_is_cancelled(rig):
    one, other, keys = rig(), rig(), chain("clear", 24)
    for key in keys:
        assert all(one.put([key]))
    token = CancellationToken()
    call = Call(cancellation=token)
    with (
        # The deadline passes here, and the caller stores pages anew.
        interrupted(os, "unlink", token.cancel, late=True),
        pytest.raises(TimeoutError, match="deadline"),
    ):
        one.storage.clear_namespaces([one.kv], call)
    left = [key for key in keys if other.hit([key])]
    # Those whose removal was announced together are gone, the rest was not touched.
    assert 0 < len(left) < len(keys)
    assert other.holds(left)


def test_people_can_read_whose_pages_a_directory_holds(rig):
    a = rig(who=identity(model="org/some model", tenant="t"))
    a.put(chain("a", 1))
    told = json.loads((a.bundles_path.parent / "namespace.json").read_text())
    assert told["identity.model"] == "org/some model"
    assert told["pool"] == "kv"
    assert told["page_bytes"] == 4096


def test_a_description_that_cannot_be_put_in_place_leaves_no_file(rig):
    a = rig()
    with failing("rename", errno.EPERM, when=lambda _, to: to.endswith("namespace.json")):
        assert a.put(chain("a", 1)) == [True]
    assert a.holds(chain("a", 1))
    assert a.temporaries() == []


@pytest.mark.parametrize(
    ("components", "told"),
    # Memory may be aligned by chance; the second length never is.
    [((4096, 4096), {0, 1}), ((1000, 3001), {1})],
    ids=["blocks", "other lengths"],
)
def test_direct_io_gives_the_same_bytes_or_is_told_to_be_impossible(rig, caplog, components, told):
    a, keys = rig(components=components, direct_io=True), chain("a", 40)
    # Several bundles.
    assert a.put(keys[:34]) + [a.put([key])[0] for key in keys[34:]] == [True] * 40
    assert a.holds(keys)
    assert a.holds(keys[7:9])
    assert sum("direct_io is not" in record.message for record in caplog.records) in told


def test_fsync_syncs_the_bytes_before_the_name_and_the_name_before_the_answer(rig, monkeypatch):
    a, steps = rig(fsync=True), list[str]()
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor):
        steps.append(
            "sync " + ("directory" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        )
        real_fsync(descriptor)

    def rename(source, target):
        steps.append("rename " + os.path.splitext(str(target))[1])
        real_rename(source, target)

    a.put(chain("first", 2))
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    assert a.put(chain("a", 2)) == [True, True]
    assert steps[:3] == ["sync file", "rename .bundle", "sync directory"]
    steps.clear()
    a.storage.delete(chain("a", 1))
    assert steps[:4] == ["sync file", "rename .claimed", "rename .bundle", "sync directory"]
