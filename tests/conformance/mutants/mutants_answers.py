"""Faults in the form of answers, in lookups, in the folding of hits, and in counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

from drivers_memory import Objects, Plain
from mutant import after, always, mutant

from hicache_storage.spec import MissReason, PoolHitPolicy, PoolName, PoolTransferResult

plain, objects = partial(mutant, base=Plain), partial(mutant, base=Objects)

# Answers of another shape
# ------------------------------------------------------------------------------------------------

SHAPES = {
    "OneValue": all,
    "Shorter": lambda answer: answer[:-1],
    "Numbers": lambda answer: [int(ok) for ok in answer],
    "Generators": lambda answer: (ok for ok in answer),
}
"""How an answer can be shaped in place of a list with one truth value for each key."""

for _step, _header, _said in (
    ("read", "GET-3 Read{} Reading", "answered"),
    ("write", "GET-3 Write{} Reading", "answered"),
    ("delete", "SET-1 Delete{} Writing", ""),
    ("batch_present", "EX-11 BatchPresent{} Existence", ""),
):
    for _shape, _change in SHAPES.items():
        # No case may break on an answer that is no list, also behind the one that finds it.
        whole = {"every_case": _shape == "OneValue"}
        plain(_header.format(_shape), _said, **{_step: after(_change)}, **whole)


def only(wanted):
    """Answers of a get for some of its pools alone."""
    return after(lambda answers: {pool: some for pool, some in answers.items() if wanted(some)})


def all_pools(right, store, *transfers):
    return {**{name: [] for name in store.pools}, **right(*transfers)}


def last_for_all(answers):
    last = next(reversed(answers.values()), [])
    return {pool: last if len(last) == len(some) else some for pool, some in answers.items()}


def kept_answer(right, store, request):
    answer = store.memo.setdefault(request.pool.name, [])
    answer[:] = right(request)
    return answer


def noting_the_pool(right, store, transfers, *more):
    store.memo["pool"] = transfers[0].name
    return right(transfers, *more)


def without_borrowers(right, store, transfers, *more):
    answer = right([transfer for transfer in transfers if transfer.keys is not None], *more)
    return {transfer.name: answer.get(transfer.name, []) for transfer in transfers}


plain("GET-3 OneValueForAllPools Reading", "answered True", get=always(True), every_case=True)
plain(
    "GET-3 OmitsPoolsOfMisses Reading", "answered {}", get=only(lambda some: any(some) or not some)
)
plain("GET-3 AnswersForEveryPool Reading", "answered", get=all_pools)
plain("GET-3 ReusesAnswers Reading", "changed", read=kept_answer)
plain("GET-3 OneAnswerForAllPools Pool", "GET-3: page", get=after(last_for_all))
plain("GET-3 NoTransfersRaise Reading", "raised IndexError", get=noting_the_pool)
plain("GET-3 BorrowsForSetsOnly Pool", "borrows kv's indices", get=without_borrowers)


# Lookups
# ------------------------------------------------------------------------------------------------


def shape(**fields):
    """A lookup's answer with other fields, each made of the right one."""
    return after(
        lambda answer: replace(
            answer, **{name: change(getattr(answer, name)) for name, change in fields.items()}
        )
    )


def last_hit_for_no_keys(right, store, keys, *more, **named):
    if keys or "last" not in store.memo:
        store.memo["last"] = right(keys, *more, **named)
    return store.memo["last"]


def unknown_pools_alone(right, store, keys, pool_transfers=None, extra_info=None):
    unknown = {one.name: 0 for one in pool_transfers or () if one.name not in store.pools}
    return PoolTransferResult(0, unknown, []) if unknown else right(keys, pool_transfers)


def min_of_maxima(right, store, *known):
    hits = right(*known).extra_pool_hit_pages
    hit = min(hits.values())
    return PoolTransferResult(hit, hits, list(range(1, hit + 1)))


def trailing_as_all(right, store, kv, pools):
    return right(kv, [
        replace(pool, hit_policy=PoolHitPolicy.ALL_PAGES)
        if pool.hit_policy is PoolHitPolicy.TRAILING_PAGES else pool for pool in pools
    ])  # fmt: skip


def groups_as_all(right, store, kv, pools):
    counted = right(kv, [replace(pool, hit_policy=PoolHitPolicy.ALL_PAGES) for pool in pools])
    answer = right(kv, pools)
    groups = [pool.name for pool in pools if pool.hit_policy is PoolHitPolicy.BLOCK_GROUPS]
    told = {pool: counted.extra_pool_hit_pages[pool] for pool in groups}
    return replace(answer, extra_pool_hit_pages={**answer.extra_pool_hit_pages, **told})


def gaps_away(right, store, kv, pools):
    return right([True] * sum(kv) + [False] * (len(kv) - sum(kv)), pools)


def no_keys(right, store, kv, pools):
    if not kv:
        raise ValueError("no keys")
    return right(kv, pools)


def unknown_for_good(right, store, name, keys):
    if name not in store.pools:
        store.seen.add(name)
    return [False] * len(keys) if name in store.seen else right(name, keys)


lookup = partial(plain, where="Existence")
lookup("EX-1 HitsAreFloats", "kv_hit_pages is", exists=shape(kv_hit_pages=float))
lookup("EX-1 MinimumOfMaxima", "must be", fold=min_of_maxima)
lookup(
    "EX-2 LooksUpSixtyFour",
    "must be",
    present=lambda right, store, name, keys: [*right(name, keys[:64]), *[False] * len(keys[64:])],
)
lookup("EX-2 CountsGapsAway", "kv .x: kv_hit_pages is 1, must be 0", fold=gaps_away)
lookup(
    "EX-2 NeedsLists",
    "AttributeError",
    present=lambda right, store, name, keys: right(name, keys.copy()),
)
lookup("EX-3 TrailingAsAll", "EX-3: kv", fold=trailing_as_all)
lookup("EX-4 GroupsAsAll", "(block_groups", fold=groups_as_all)
lookup(
    "EX-5 EndpointsAreAnIterator",
    "restorable_prefix_pages is",
    exists=shape(restorable_prefix_pages=lambda listed: iter(listed) if listed else listed),
)
lookup(
    "EX-5 NoList",
    "restorable_prefix_pages is",
    exists=shape(restorable_prefix_pages=lambda listed: listed[-1:]),
)
lookup(
    "EX-6 OmitsPools",
    "is None, must be 0",
    exists=shape(
        extra_pool_hit_pages=lambda hits: {pool: hits[pool] for pool in hits if hits[pool]}
    ),
)
lookup("EX-6 UnknownPoolsHideTheOthers", "unregistered", exists=unknown_pools_alone)
lookup(
    "EX-7 RaisesOnUnknownPools",
    "raised KeyError",
    present=lambda right, store, name, keys: (store.pools[name], right(name, keys))[1],
)
lookup("EX-7 RemembersUnknownPools", "registered", present=unknown_for_good)
lookup("EX-8 NoKeysRepeatTheLastHit", "kv_hit_pages is 2 for 0 keys", exists=last_hit_for_no_keys)
lookup("EX-8 FailsWithoutKeys", "no keys", fold=no_keys)


# Presence of each page
# ------------------------------------------------------------------------------------------------


present = partial(objects, breaks="EX-11", where="Existence")
present(
    "PresenceInOrderOfKeys",
    "must be",
    batch_present=lambda right, store, keys, **named: right(sorted(keys), **named),
)
present("PresenceOfKV", "'mamba'", batch_present=lambda right, store, keys, **_: right(keys))


# Counters
# ------------------------------------------------------------------------------------------------


def misses_of_lookups(right, store, keys, *more, **named):
    answer = right(keys, *more, **named)
    absent = Counter({MissReason.ABSENT: len(keys) - answer.kv_hit_pages})
    store.recorder.count(PoolName.KV, missed=absent)
    return answer


def without_bytes(right, store):
    stats = right()
    for pool in stats.pools.values():
        pool.bytes_read = 0
    return stats


counts = partial(objects, breaks="OB-1", where="Stats")
counts("CountsNoBytes", "bytes_read of pool 'kv' is 0, must be 1024", stats=without_bytes)
counts("CountsLookupsAsMisses", "pages_missed", exists=misses_of_lookups)


def faults_with_metrics(right, store):
    stats = right()
    stats.faults *= store.recorder.enabled
    return stats


def with_metrics(right, store, *arguments, **named):
    store.recorder.enabled = True
    return right(*arguments, **named)


silent = partial(objects, breaks="OB-2", where="Stats")
silent(
    "HidesFaults",
    "with metrics off, get_stats() tells 0 faults after 0 and one more",
    stats=faults_with_metrics,
)
silent(
    "CountsWithMetricsOff",
    "metrics are off, and get_stats() counts for pool 'kv'",
    exists=with_metrics,
)
