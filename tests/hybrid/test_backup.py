"""Backups of one rank: what is stored stays, the rest is tried again, and the pages rest as long as
they are used."""

from __future__ import annotations

from itertools import takewhile

import pytest
import torch

from hicache_storage.hybrid import BackupResult, HybridIndices, ParallelConfig, page_hashes
from hicache_storage.spec import InvalidTransferError, PoolTransfer, PoolTransferResult
from tests.hybrid.stack import INDEXER, KV, MAMBA, PAGE, identity, tokens
from tests.hybrid.test_prefetch import Raising, fetched
from tests.support.waiting import eventually

KEYS = page_hashes(tokens(12), PAGE)


def backed_up(stack, host, keys=KEYS, prefix=()):
    number = stack.controller.write_storage(host, keys[: host.anchor.numel() // PAGE], prefix)
    [result] = eventually(stack.controller.completed_backups)
    assert result.operation_id == number
    return result


def stored(number, pages, **changes):
    return BackupResult(number, pages, **{"complete": True, **changes})


def filled(stack, pages, ends=()):
    host = stack.take("host", pages, ends)
    stack.fill("host", host, KEYS)
    return host


def test_all_pools_are_stored(stack, store):
    stack.controller.attach(store.open())
    host = filled(stack, 6, ends=(2, 6))
    assert backed_up(stack, host) == stored(1, 6)
    assert stack.controller.stats().pages_backed_up == 6 + 6 + 2
    stack.controller.free_host(host)
    result = fetched(stack, 6)
    assert result.tokens == 6 * PAGE
    assert stack.holds("host", result.host, KEYS)


def test_a_state_alone_is_stored_under_the_key_before_it(stack, store):
    stack.controller.attach(store.open())
    backed_up(stack, filled(stack, 4))
    alone = stack.take("host", 0, ends=(1,))
    alone = HybridIndices(alone.anchor, alone.side, {MAMBA: (0,)})
    stack.fill("host", alone, [], KEYS[:4])
    assert backed_up(stack, alone, prefix=KEYS[:4]) == stored(2, 0)
    assert fetched(stack, 4).tokens == 4 * PAGE


class Partial(Raising):
    """A storage that stores and reports only what `keeps` says, page by page."""

    def __init__(self, inner, keeps):
        super().__init__(inner, "", None)
        self.keeps, self.calls = keeps, []

    def batch_set_v2(self, transfers, info=None):
        self.calls.append({transfer.name: list(transfer.keys) for transfer in transfers})
        answer, kept = {}, []
        for transfer in transfers:
            rows = transfer.host_indices.view(len(transfer.keys), -1)
            answer[transfer.name] = [
                self.keeps(len(self.calls), transfer.name, key) for key in transfer.keys
            ]
            chosen = [number for number, keep in enumerate(answer[transfer.name]) if keep]
            kept.append(
                PoolTransfer(
                    transfer.name,
                    rows[chosen].view(-1),
                    keys=[transfer.keys[number] for number in chosen],
                )
            )
        self._inner.batch_set_v2(kept, info)
        return answer


def test_what_was_stored_is_kept_and_the_rest_tried_again(stack, store):
    """The peer stored 3 of 4 pages, counted none, and never tried again."""
    storage = Partial(
        store.open(), lambda call, pool, key: call > 1 or (pool, key) != (KV, KEYS[2])
    )
    stack.controller.attach(storage)
    host = filled(stack, 4, ends=(4,))
    assert backed_up(stack, host) == stored(1, 4)
    assert storage.calls[1:] == [{KV: [KEYS[2]]}]
    assert stack.controller.stats().backup_retries == 1


@pytest.mark.parametrize(
    ("pool", "page", "pages"),
    [(KV, 3, 3), (INDEXER, 1, 1), (MAMBA, 1, 1), (MAMBA, 5, 5), (KV, 0, 0)],
)
def test_what_is_never_stored_is_given_up(stack, store, pool, page, pages):
    storage = Partial(store.open(), lambda call, name, key: (name, key) != (pool, KEYS[page]))
    stack.controller.attach(storage)
    assert backed_up(stack, filled(stack, 6, ends=(2, 6))) == stored(1, pages, complete=False)
    assert len(storage.calls) == 3
    stats = stack.controller.stats()
    assert (stats.pages_backed_up, stats.pages_dropped, stats.backup_retries) == (13, 1, 2)


def test_calls_take_so_many_pages_of_all_pools(stack, store, monkeypatch):
    monkeypatch.setattr("hicache_storage.hybrid.storage_io.backups.BATCH_PAGES", 4)
    storage = Partial(store.open(), lambda call, pool, key: True)
    stack.controller.attach(storage)
    assert backed_up(stack, filled(stack, 6, ends=(2, 4, 5))).complete
    assert storage.calls == [
        {INDEXER: KEYS[:4], KV: KEYS[:4], MAMBA: [KEYS[1], KEYS[3]]},
        {INDEXER: KEYS[4:6], KV: KEYS[4:6], MAMBA: [KEYS[4]]},
    ]


class Forgetful(Raising):
    """A storage that says of no page in `lost` that it is there, and of none at all once it is
    `down`."""

    def __init__(self, inner, lost):
        super().__init__(inner, "", None)
        self.lost, self.down, self.lookups = lost, False, 0

    def batch_exists_v2(self, keys, transfers=None, info=None):
        self.lookups += 1
        there = [] if self.down else list(takewhile(lambda key: key not in self.lost, keys))
        return PoolTransferResult(len(there), {}, list(range(1, len(there) + 1)))


def test_what_is_missing_before_a_span_is_told(stack, store):
    """An L3 evicts the beginning of a conversation that is alive on the host: what is stored behind
    it is of no use."""
    storage = Forgetful(store.open(), set())
    stack.controller.attach(storage)
    assert backed_up(stack, filled(stack, 4), prefix=()) == stored(1, 4)
    assert storage.lookups == 0
    assert backed_up(stack, filled(stack, 2), KEYS[4:6], KEYS[:4]) == stored(2, 2)
    assert storage.lookups == 1
    storage.lost = {KEYS[2], KEYS[3]}
    assert backed_up(stack, filled(stack, 2), KEYS[6:8], KEYS[:6]) == stored(3, 2, lost_from=2)
    storage.lost = {KEYS[0]}
    assert backed_up(stack, filled(stack, 2), KEYS[8:10], KEYS[:8]) == stored(4, 2, lost_from=0)


def test_a_storage_that_is_down_has_lost_nothing(stack, store):
    """It has not even what it has just taken; a storm of rewriting would meet it when it is
    back."""
    storage = Forgetful(store.open(), set())
    stack.controller.attach(storage)
    storage.down = True
    assert backed_up(stack, filled(stack, 2), KEYS[4:6], KEYS[:4]) == stored(1, 2)
    storage.down, storage.lost = False, {KEYS[0], KEYS[4]}
    assert backed_up(stack, filled(stack, 2), KEYS[4:6], KEYS[:4]) == stored(2, 2)


@pytest.mark.parametrize("error", [SystemExit(1), OSError("down")])
def test_looking_for_what_is_missing_may_fail(stack, store, error):
    stack.controller.attach(Raising(store.open(), "batch_exists_v2", error))
    assert backed_up(stack, filled(stack, 2), KEYS[4:6], KEYS[:4]) == stored(1, 2)
    assert stack.controller.stats().storage_errors == 2


@pytest.mark.parametrize(
    "answer", [SystemExit(1), OSError("down"), None, {}, [True], lambda answer: {KV: [True]}]
)
def test_a_storage_that_fails_stores_nothing(stack, store, answer):
    stack.controller.attach(Raising(store.open(), "batch_set_v2", answer))
    host = filled(stack, 3)
    assert backed_up(stack, host) == stored(1, 0, complete=False)
    stack.controller.free_host(host)
    assert stack.free() == stack.total()


def test_without_a_storage_nothing_is_stored(stack):
    assert backed_up(stack, filled(stack, 2)) == stored(1, 0, complete=False)


def test_a_page_that_is_being_stored_is_not_handed_out(stack, store, gate):
    storage, hang = store.open(), gate("write")
    stack.controller.attach(storage)
    storage.before = hang
    host = filled(stack, 12, ends=(12,))
    stack.controller.write_storage(host, KEYS)
    assert hang.entered.wait(60)
    stack.controller.free_host(host)
    assert stack.free() == {KV: 4 * PAGE, MAMBA: 7}
    assert stack.controller.completed_backups() == []
    hang.open()
    [result] = eventually(stack.controller.completed_backups)
    assert result.complete
    assert stack.free() == stack.total()


def test_a_storage_that_hangs_is_left_behind(stack, store, gate, impatient):
    storage, hang = store.open(), gate("write")
    impatient(hang)
    stack.controller.attach(storage)
    storage.before = hang
    host = filled(stack, 3, ends=(3,))
    assert backed_up(stack, host) == stored(1, 0, complete=False)
    stack.controller.free_host(host)
    assert stack.free() == {KV: 13 * PAGE, MAMBA: 7}
    hang.open()
    eventually(lambda: stack.free() == stack.total())


@pytest.mark.parametrize("end", ["detach", "reset"])
def test_ending_tells_or_forgets_what_is_on_its_way(make_stack, store, gate, end):
    storage, hang = store.open(), gate("write")
    stack = make_stack(stop_seconds=0.05)
    stack.controller.attach(storage)
    storage.before = hang
    hosts = [filled(stack, 2), filled(stack, 3)]
    numbers = [
        stack.controller.write_storage(host, KEYS[: host.anchor.numel() // PAGE]) for host in hosts
    ]
    assert hang.entered.wait(60)
    getattr(stack.controller, end)()
    told = [stored(number, 0, complete=False) for number in numbers] if end == "detach" else []
    assert stack.controller.completed_backups() == told
    for host in hosts:
        stack.controller.free_host(host)
    assert stack.free()[KV] <= 14 * PAGE
    hang.open()
    eventually(lambda: stack.free() == stack.total())


@pytest.mark.parametrize(
    ("replicated", "tp_rank", "pools"),
    [(False, 1, {INDEXER, KV, MAMBA}), (True, 0, {INDEXER, KV, MAMBA}), (True, 1, {MAMBA})],
)
def test_a_replicated_pool_has_one_writer(make_stack, kit, replicated, tp_rank, pools):
    """States are sharded over TP also where KV is not (rule ID-3)."""

    class Two:
        size = 2

        def all_reduce_min(self, values):
            return list(values)

    parallel = ParallelConfig(tp_rank=tp_rank, tp_size=2)
    stack = make_stack(parallel=parallel, rank_group=Two())
    storage = Partial(
        kit.storage(identity(parallel, kv_replicated=replicated)), lambda call, pool, key: True
    )
    kit.opened.append(storage._inner)
    stack.controller.attach(storage)
    assert backed_up(stack, filled(stack, 2, ends=(2,))).complete
    assert set().union(*storage.calls) == pools


@pytest.mark.parametrize(
    ("host", "hashes", "message"),
    [
        (HybridIndices(torch.arange(2 * PAGE)), KEYS[:1], "one for each of 2 pages, got 1"),
        (HybridIndices(torch.arange(2 * PAGE - 1)), KEYS[:2], "anchor"),
        (
            HybridIndices(torch.arange(0), {MAMBA: torch.arange(1)}, {MAMBA: (0,)}),
            [],
            "prefix_hashes is empty",
        ),
    ],
)
def test_spans_that_do_not_fit_are_refused(stack, host, hashes, message):
    with pytest.raises(InvalidTransferError, match=message):
        stack.controller.write_storage(host, hashes)
    assert stack.controller.completed_backups() == []
