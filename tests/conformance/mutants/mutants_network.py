"""Faults of drivers of one server, and of several."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec
from drivers_network import ACROSS, Networked, Spread
from mutant import always, mutant, right

from hicache_storage.spec import StorageUnavailableError

network, spread = partial(mutant, base=Networked), partial(mutant, base=Spread)
CANNOT_HANG = replace(ACROSS, may_hang=False)
right(
    "Networked Fault Deadline Plan Applied FailedClear Stall Sharing Budget",
    Networked,
    injectors=("network", "services"),
)
right("Spread Member", Spread)


# One server
# ------------------------------------------------------------------------------------------------


def on_the_first_connection(right, store, call, *request):
    with store.lock:
        if not store.idle:
            store.idle.append(store.fresh(call))
        try:
            return store.talk(store.idle[0], call, request)
        except msgspec.DecodeError as error:
            raise StorageUnavailableError(str(error)) from error


def anything(right, store, call, *request):
    try:
        return right(call, *request)
    except (OSError, StorageUnavailableError):
        return [None if request[0] == "get" else False] * len(request[1])


told = partial(network, where="test_a_trouble_is_a_miss")
network(
    "FT-4 NeverReconnects test_the_same_storage_recovers",
    "after the fault was gone",
    asked=on_the_first_connection,
)
network(
    "FT-3 WaitsForEver test_a_hung_store",
    "has not ended",
    promises=CANNOT_HANG,
    seconds=always(None),
)
network(
    "FT-4 LeavesItToTheDeadline test_half_open_connections",
    "its connection has no timeout",
    injectors=("network",),
    seconds=always(None),
)
told("FT-1 TakesAnythingForAnAnswer", "get_stats() counts no fault", asked=anything)


# Several servers
# ------------------------------------------------------------------------------------------------


def one_for_all(right, store, home):
    if not right(home):
        raise StorageUnavailableError(f"server {home} does not answer")
    return True


def raised(right, store, faults, answers):
    if faults:
        raise faults[0]


members = partial(spread, breaks="FT-8")
members(
    "OneServerFailsAll test_one_of_several_stores[killed]",
    "gets have missed it",
    may_ask=one_for_all,
    note=raised,
)
members(
    "OneServerHasAllThreads test_one_of_several_stores[stopped]",
    "(members: hang: ",
    threads=8,
    member_seconds=always(60.0),
)
