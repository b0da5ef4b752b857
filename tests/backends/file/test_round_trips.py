"""Pages are read back byte by byte, by storages of equal identity and no other."""

from __future__ import annotations

import errno
import json
import os
import threading

import pytest
import torch

from hicache_backends.file import store as store_module
from hicache_backends.file import writer as writer_module
from hicache_storage import create_storage
from hicache_storage.spec import PoolTransfer
from tests.backends.file.harness import OVERHEAD_BYTES, Rig, ScratchPool, chain, content, identity


def test_a_batch_comes_back(rig):
    a, keys = rig(), chain("a", 20)
    assert a.hit(keys) == 0
    assert a.put(keys) == [True] * 20
    assert a.hit(keys) == 20
    assert a.holds(keys)
    assert len(a.bundles()) == 1


def test_another_storage_sees_it_at_once(rig):
    a, b = rig(), rig()
    for turn in range(30):
        keys = chain(f"turn {turn}", 3)
        writer, reader = (a, b) if turn % 2 else (b, a)
        assert writer.put(keys) == [True] * 3
        assert reader.hit(keys) == 3
        assert reader.holds(keys)


def test_a_get_finds_what_no_exists_has_asked_for(rig):
    a, b = rig(), rig()
    assert b.get(chain("a", 2)) == [None, None]
    a.put(chain("a", 2))
    assert b.holds(chain("a", 2))


def test_pages_survive_closing(rig):
    a, keys = rig(), chain("a", 5)
    a.put(keys)
    a.storage.close()
    assert rig().holds(keys)


def test_holes_and_duplicates_keep_their_places(rig):
    a, keys = rig(), chain("a", 6)
    a.put([keys[0], keys[2], keys[5]])
    asked = [keys[5], keys[1], keys[0], keys[0], keys[4], keys[2], keys[5]]
    assert a.versions(asked) == [0, None, 0, 0, None, 0, 0]
    assert a.hit(keys) == 1


def test_pages_are_read_in_any_order(rig):
    a, keys = rig(), chain("a", 12)
    a.put(keys)
    a.put(chain("b", 3))
    mixed = [*keys[::-1], *chain("b", 3), keys[3], keys[4]]
    assert a.holds(mixed)


def test_an_existing_page_is_not_written_again(rig):
    a, keys = rig(), chain("a", 4)
    a.put(keys)
    before = a.bundles()
    assert a.put(keys, version=1) == [True] * 4
    assert a.bundles() == before
    assert a.holds(keys, version=0)
    assert a.put([*keys, "more"], version=1) == [True] * 5
    assert a.versions([*keys, "more"], (0, 1)) == [0, 0, 0, 0, 1]


STRANGE_KEYS = [
    "../../x",
    "..",
    ".",
    "/",
    "/etc/passwd",
    "x/y",
    "x-y",
    "x\\y",
    "",
    " ",
    "a b",
    "A",
    "a",
    "ä",
    "a\u0308",
    "\u00e4",
    "CON",
    "nul",
    "*",
    "?",
    "-rf",
    "x\n",
    "x\t",
    "日本語",
    "🙂",
    "k" * 512,
    ".bundle",
    "stamp",
    "x.y",
    "x,y",
    "\x01",
    "\ufeff",
]


def test_any_text_is_a_key_and_no_two_are_the_same(rig, tmp_path):
    a, b = rig(pages=len(STRANGE_KEYS)), rig(pages=len(STRANGE_KEYS))
    distinct = list(dict.fromkeys(STRANGE_KEYS))
    assert a.put(distinct) == [True] * len(distinct)
    assert b.holds(distinct)
    for number, key in enumerate(distinct):
        c = rig(tmp_path / f"alone {number}")
        c.put([key])
        assert [other for other in distinct if c.hit([other])] == [key]
    assert {path.name for path in tmp_path.iterdir()} == {
        "store",
        *(f"alone {number}" for number in range(len(distinct))),
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other"},
        {"kv_dtype": "float16"},
        {"layout": "layer_first"},
        {"page_size": 8},
        {"revision": "r"},
        {"tp_size": 2},
        {"tp_rank": 1, "tp_size": 2},
        {"pp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"cp_size": 2},
        {"cp_rank": 1, "cp_size": 2},
        {"dp_replicated": False, "dp_rank": 1, "dp_size": 2},
        {"tenant": "t"},
        {"adapter": "lora"},
        {"salt": "s"},
        {"layer_end": 4},
        {"head_end": 2},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_another_identity_shares_nothing(rig, changes):
    share_nothing(rig(), rig(who=identity(**changes)))


@pytest.mark.parametrize(
    "other",
    [
        {"components": (4096,)},
        {"components": (3096, 1000)},
        {"components": (500, 1548)},
        {"components": (2000, 6192)},
        {"dtype": "float16"},
        {"layout": "layer_first"},
    ],
    ids=str,
)
def test_a_pool_of_another_geometry_shares_nothing(rig, other):
    share_nothing(rig(), rig(**other))


def share_nothing(a, b):
    keys = chain("a", 3)
    a.put(keys)
    assert b.hit(keys) == 0
    assert b.get(keys) == [None] * 3
    b.put(keys, version=1)
    assert a.holds(keys, version=0)
    assert b.holds(keys, version=1)


def test_pools_of_one_storage_are_kept_apart(rig):
    a, side = rig(), ScratchPool(8, (64,))
    a.storage.register_mem_host_pool_v2(side, "mamba")
    keys = chain("a", 4)
    for number, key in enumerate(keys):
        a.pool.page(number)[:] = content(key, 0, a.page_bytes)
        side.page(number)[:] = content(key, 9, 64)
    transfers = [PoolTransfer(name, torch.arange(16), keys=keys) for name in ("kv", "mamba")]
    assert a.storage.batch_set_v2(transfers) == {"kv": [True] * 4, "mamba": [True] * 4}
    side.memory[:] = bytes(len(side.memory))
    assert a.storage.batch_get_v2(transfers) == {"kv": [True] * 4, "mamba": [True] * 4}
    assert [bytes(side.page(number)) for number in range(4)] == [
        content(key, 9, 64) for key in keys
    ]
    assert a.storage.batch_exists_v2(keys, [PoolTransfer("mamba", keys=keys[:1])]).kv_hit_pages == 4
    a.storage.delete(keys, pool="mamba")
    assert a.hit(keys) == 4


def test_pages_that_lie_apart_in_the_host_pool_are_served(rig):
    a, keys = rig(pages=16), chain("a", 4)
    slots = torch.cat([torch.arange(page * 4, page * 4 + 4) for page in (9, 2, 15, 0)])
    for page, key in zip((9, 2, 15, 0), keys, strict=True):
        a.pool.page(page)[:] = content(key, 0, a.page_bytes)
    assert a.storage.batch_set_v2([PoolTransfer("kv", slots, keys=keys)])["kv"] == [True] * 4
    a.pool.memory[:] = b"\xee" * len(a.pool.memory)
    back = torch.cat([torch.arange(page * 4, page * 4 + 4) for page in (3, 14, 1, 7)])
    assert a.storage.batch_get_v2([PoolTransfer("kv", back, keys=keys)])["kv"] == [True] * 4
    for page, key in zip((3, 14, 1, 7), keys, strict=True):
        assert a.pool.page(page) == content(key, 0, a.page_bytes)
    untouched = set(range(16)) - {3, 14, 1, 7}
    assert all(bytes(a.pool.page(page)) == b"\xee" * a.page_bytes for page in untouched)


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
def test_pages_of_any_size_and_number_of_components(rig, components):
    a, b = rig(pages=5, components=components), rig(pages=5, components=components)
    keys = chain("a", 5)
    assert a.put(keys) == [True] * 5
    assert b.holds(keys)
    assert b.holds(keys[2:4])


def test_a_large_batch_becomes_several_bundles_in_the_order_of_its_chain(rig, monkeypatch):
    monkeypatch.setattr(writer_module, "MAX_BUNDLE_BYTES", 40_000)
    monkeypatch.setattr(store_module, "MIN_BUNDLE_BYTES", 20_000)
    a, keys = rig(threads=3), chain("a", 64)
    assert a.put(keys) == [True] * 64
    assert len(a.bundles()) == 8
    assert a.holds(keys)
    ages = {path: path.stat().st_mtime_ns for path in a.bundles()}
    page_index = a.store.page_indexes([a.storage.pools["kv"].namespace])[0]
    in_chain = [str(page_index.pages[key][0].path) for key in keys]
    order = list(dict.fromkeys(in_chain))
    times = [ages[next(path for path in ages if str(path) == name)] for name in order]
    assert times == sorted(times, reverse=True)
    assert rig().holds(keys)


def test_several_threads_read_and_write_one_large_call(rig, monkeypatch):
    monkeypatch.setattr(store_module, "MIN_BUNDLE_BYTES", 80_000)
    before = set(threading.enumerate())
    a = rig(threads=4)
    a.store.reader._bytes_per_thread = 50_000
    keys = chain("a", 64)
    assert a.put(keys) == [True] * 64
    assert len(a.bundles()) == 3
    assert a.holds(keys)
    # The caller is the fourth, and an idle thread is used before another is started.
    started = [thread.name for thread in set(threading.enumerate()) - before]
    assert 1 <= started.count("hicache-file") <= 3


def test_delete_removes_pages_for_everyone(rig):
    a, b, keys = rig(), rig(), chain("a", 8)
    a.put(keys)
    assert b.holds(keys)
    assert a.storage.delete([keys[2], keys[5], "never stored"]) == [True, True, False]
    for side in (a, b, rig()):
        assert side.present(keys) == [True, True, False, True, True, False, True, True]
        assert side.versions(keys) == [0, 0, None, 0, 0, None, 0, 0]
    assert b.storage.delete(keys) == [True, True, False, True, True, False, True, True]
    assert a.present(keys) == [False] * 8
    assert a.bundles() == []
    assert a.put(keys, version=1) == [True] * 8
    assert b.holds(keys, version=1)


def test_delete_removes_every_copy(rig):
    a, b, keys = rig(), rig(), chain("a", 4)
    # Two writers that did not know of each other.
    b.hit(keys)
    a.put(keys)
    b.store.feed.read = lambda: b.store.feed._snapshot
    b.put(keys, version=1)
    del b.store.feed.read
    assert len(a.bundles()) == 2
    c = rig()
    assert all(version in (0, 1) for version in c.versions(keys, (0, 1)))
    assert c.storage.delete(keys[:2]) == [True, True]
    for side in (a, b, c, rig()):
        assert side.present(keys) == [False, False, True, True]


def test_of_two_copies_one_remains_when_the_other_goes(rig):
    a, b, keys = rig(), rig(), chain("a", 3)
    b.hit(keys)
    a.put(keys)
    b.store.feed.read = lambda: b.store.feed._snapshot
    b.put(keys, version=1)
    del b.store.feed.read
    c = rig()
    for path in (a.bundles()[0], a.bundles()[1]):
        assert c.hit(keys) == 3
        page_index = c.store.page_indexes([c.storage.pools["kv"].namespace])[0]
        bundle = next(
            bundle for bundle in page_index.bundle_set.bundles.values() if bundle.path == str(path)
        )
        c.store.publisher.remove(page_index.bundle_set, [bundle])
        left = len(c.bundles())
        for side in (a, b, c):
            assert side.hit(keys) == (3 if left else 0)
            assert all(version is not None for version in side.versions(keys, (0, 1))) == bool(left)


def test_clear_removes_this_identitys_pages_and_nothing_else(rig):
    a, other, b = rig(), rig(who=identity(model="a_m")), rig()
    a.put(chain("a", 4))
    other.put(chain("o", 4))
    strangers = [
        a.path / "precious",
        a.bundles_path / "notes.txt",
        a.bundles_path / "aaaaaaaaaa-1-2-3-4.bundle.bak",
        a.bundles_path / "x-1-2-3-4.bundle",
        a.bundles_path.parent / "mine",
        a.path / "hicache-file-1" / "also mine",
    ]
    for path in strangers:
        path.write_text("do not touch")
    directory = a.bundles_path / "bbbbbbbbbb-1-2-3-4.bundle"
    directory.mkdir()
    assert b.hit(chain("a", 4)) == 4
    a.storage.clear()
    assert a.hit(chain("a", 4)) == b.hit(chain("a", 4)) == 0
    assert other.holds(chain("o", 4))
    assert all(path.read_text() == "do not touch" for path in strangers)
    assert a.put(chain("a", 4), version=1) == [True] * 4
    assert b.holds(chain("a", 4), version=1)


def test_clear_removes_also_what_was_never_announced(rig, monkeypatch):
    a, b = rig(), rig()
    b.hit(["x"])
    monkeypatch.setattr(a.store.feed, "announce", lambda: None)
    a.put(chain("a", 2))
    b.storage.clear()
    assert b.bundles() == []
    assert rig().hit(chain("a", 2)) == 0


def test_people_can_read_whose_pages_a_directory_holds(rig):
    a = rig(who=identity(model="org/some model", tenant="t"))
    a.put(chain("a", 1))
    told = json.loads((a.bundles_path.parent / "namespace.json").read_text())
    assert told["identity.model"] == "org/some model"
    assert told["pool"] == "kv"
    assert told["page_bytes"] == 4096


def test_a_description_that_cannot_be_put_in_place_leaves_no_file(rig, monkeypatch):
    a, rename = rig(), os.rename

    def refuse(source, target):
        if str(target).endswith("namespace.json"):
            raise PermissionError(errno.EPERM, "not here")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    assert a.put(chain("a", 1)) == [True]
    assert a.holds(chain("a", 1))
    assert os.listdir(a.store.paths.temporaries) == []


@pytest.mark.parametrize("layers", [True, False])
def test_it_is_created_by_name(tmp_path, layers):
    storage = create_storage(
        "file", identity(), {"path": str(tmp_path / "s"), "capacity": "10MiB", "fsync": "true"}
    )
    pool = ScratchPool(4, (100,))
    storage.register_mem_host_pool_v2(pool, "kv")
    with storage:
        assert storage.capabilities.evicts
        transfer = PoolTransfer("kv", torch.arange(16), keys=chain("a", 4))
        assert storage.batch_set_v2([transfer])["kv"] == [True] * 4
        assert storage.batch_get_v2([transfer])["kv"] == [True] * 4


def test_direct_io_gives_the_same_bytes(rig):
    a = rig(components=(4096, 4096), direct_io=True, threads=2)
    keys = chain("a", 40)
    assert a.put(keys) == [True] * 40
    assert a.holds(keys)
    assert a.holds(keys[7:9])


def test_direct_io_falls_back_where_pages_do_not_fit_blocks(rig, caplog):
    # Memory may be aligned by chance; this length never is.
    a, keys = rig(components=(1000, 3001), direct_io=True), chain("a", 10)
    a.put(keys)
    assert a.holds(keys)
    assert a.holds(keys)
    assert sum("direct_io is not possible" in record.message for record in caplog.records) == 1


def test_direct_io_falls_back_for_every_bundle_of_a_call(rig):
    a, keys = rig(direct_io=True), chain("a", 6)
    for key in keys:
        a.put([key])
    assert a.holds(keys)


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


def test_a_page_costs_its_bytes_and_its_name(rig):
    a: Rig = rig()
    a.put(chain("a", 10))
    assert (
        a.bundles()[0].stat().st_size == a.bundle_bytes(10) == 10 * (4096 + OVERHEAD_BYTES) - 1 + 64
    )
