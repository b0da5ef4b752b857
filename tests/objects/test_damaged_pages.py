"""Damaged pages, beside the suite's `CorruptObjectCases`: the log, and what a driver discards."""

from __future__ import annotations

import logging

import pytest

from hicache_storage.objects import ObjectRead
from tests.objects.storing import stored


class TestDamage:
    @pytest.mark.parametrize(
        ("what", "defect"),
        [
            ("bit", "whose checksum does not fit its bytes"),
            ("short", "whose object has another length: 127 bytes, not 128"),
            ("long", "whose object has another length: 129 bytes, not 128"),
            ("empty", "whose object has another length: 0 bytes, not 128"),
            ("page alone", "whose object has no envelope: 64 bytes, not 128"),
            ("other key", "whose envelope belongs to another key"),
            ("other pool", "whose envelope belongs to another identity, pool or geometry"),
            ("no envelope", "whose envelope is missing or overwritten"),
            ("other version", "whose envelope has version 2"),
            ("other length", "whose envelope belongs to a page of another length: 1 bytes, not 64"),
        ],
    )
    def test_the_log_says_what_is_wrong_with_a_damaged_page(self, kit, what, defect, caplog):
        storage, pool = kit.memory_storage({"kv": kit.pool(), "mamba": kit.pool()})
        stored(storage, pool, ["a", "b"], [0, 1])
        name = storage.pools["kv"].namespace.object_name("a")
        other = storage.pools["kv"].namespace.object_name("b")
        storage.batch_set_v2([pool.transfer("mamba", ["a"], [0])])
        payload = storage.objects[name]
        storage.objects[name] = {
            "bit": bytes([payload[0] ^ 1]) + payload[1:],
            "short": payload[:-1],
            "long": payload + b"\0",
            "other key": storage.objects[other],
            "other pool": storage.objects[storage.pools["mamba"].namespace.object_name("a")],
            "empty": b"",
            "page alone": payload[:-64],
            "no envelope": payload[:-64] + bytes(64),
            "other version": payload[:-60] + b"\2" + payload[-59:],
            "other length": payload[:-56] + b"\1" + payload[-55:],
        }[what]
        with caplog.at_level(logging.WARNING):
            assert storage.batch_get_v2([pool.transfer("kv", ["a", "b"], [4, 5])]) == {
                "kv": [False, True]
            }
        assert f"1 damaged pages in pool kv, first 'a', {defect}" in caplog.text

    def test_a_driver_that_discards_leaves_nothing_to_remember(self, kit):
        storage, pool = kit.memory_storage()
        stored(storage, pool, ["a"], [0])
        (name,) = storage.objects
        storage.objects[name] = b"torn"
        storage.discard_objects = lambda batches, call: storage.objects.pop(name) is not None
        assert storage.batch_get_v2([pool.transfer("kv", ["a"], [4])]) == {"kv": [False]}
        storage.objects[name] = b"written by somebody else"
        assert storage.batch_exists_v2(["a"]).kv_hit_pages == 1

    @pytest.mark.parametrize(
        ("damage", "now", "expected"),
        [
            ("bit", "damaged", True),
            ("bit", "repaired", False),
            ("short", "damaged", True),
            ("short", "repaired", False),
            ("bit", "short", True),
        ],
    )
    def test_a_read_knows_the_object_that_it_has_read(self, kit, damage, now, expected):
        storage, pool = kit.memory_storage()
        stored(storage, pool, ["a"], [0])
        (good,) = storage.objects.values()
        damaged = {"bit": bytes([good[0] ^ 1]) + good[1:], "short": good[:-1]}
        read = ObjectRead.aside(storage.pools["kv"].namespace, "a")
        assert not (read.fill(damaged[damage]) and read.verify())
        # Equal bytes, but written at another time: the generation differs.
        storage.delete(["a"])
        stored(storage, pool, ["a"], [0])
        (repaired,) = storage.objects.values()
        found = {"damaged": damaged[damage], "repaired": repaired, "short": damaged["short"]}[now]
        assert read.has_read(memoryview(found)) is expected

    def test_without_checksums_the_rest_is_still_verified(self, kit):
        storage, pool = kit.memory_storage(verifies_checksums=False)
        stored(storage, pool, ["a", "b"], [0, 1])
        names = [storage.pools["kv"].namespace.object_name(key) for key in "ab"]
        flipped = bytes([storage.objects[names[0]][0] ^ 1]) + storage.objects[names[0]][1:]
        storage.objects[names[0]] = flipped
        assert storage.batch_get_v2([pool.transfer("kv", ["a"], [4])]) == {"kv": [True]}
        storage.objects[names[0]] = storage.objects[names[1]]
        assert storage.batch_get_v2([pool.transfer("kv", ["a"], [4])]) == {"kv": [False]}
        assert storage.get_stats().verifies_checksums is False
