"""Faults of a limited capacity: what is evicted, and what happens when nothing fits any more."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from drivers_files import DRAFT, PAGE, BoundedFiles, mtime
from drivers_memory import Slots
from mutant import IN_PROCESS, after, always, mutant, right
from mutants_files import unmarked_late

from hicache_storage.objects import ObjectWrite
from hicache_storage.spec import HungReads

files = partial(mutant, base=BoundedFiles)
slots = partial(mutant, base=Slots)
right("BoundedFiles EvictionProcess Eviction Space Durability", BoundedFiles)
right("Slots Eviction Space", Slots)


# What counts
# ------------------------------------------------------------------------------------------------


def slow_draft(right, store, path):
    """A draft takes much room and a while, so that whoever kills its writer finds it at that."""
    draft = right(path)
    draft.write_bytes(bytes(64 << 10))
    time.sleep(0.01)
    return draft


def suffixed(store):
    return f"_{store.identity.model.replace('/', '_')}{PAGE}"


def by_model(right, store, namespace, key):
    """The models' files are told apart by how their names end."""
    plain = right(namespace, key)
    return plain.with_name(plain.stem + suffixed(store))


def of_the_model(right, store):
    return sorted(store.root.glob(f"*/*{suffixed(store)}"), key=mtime)


counted = partial(files, breaks="EV-1", where="Eviction")
counted("IgnoresItsCapacity", "the capacity is", make_room=always(None))
counted(
    "EvictsTheIndexOnly",
    "lie on the disk after more writing",
    remove=lambda right, store, path: bool(path.rename(path.with_suffix(".evicted"))),
)
counted(
    "EvictsByName",
    "was taken for a page of 'b' by its name",
    path=by_model,
    counted=of_the_model,
    victims=of_the_model,
)
leftovers = partial(
    files, breaks="EV-1", where="EvictionProcess", draft=slow_draft, collect=always(None)
)
leftovers("CountsDraftsForGood", "pages before, and holds")
leftovers(
    "LeavesDraftsUncounted",
    "bytes before, and takes",
    counted=lambda right, store: [path for path in right() if path.suffix != DRAFT],
)
files("OB-1 CountsNoEvictions Eviction", "pages_evicted is 0", count_evictions=always(None))
files(
    "FT-5 UnmarksEvictedLate test_an_evictor_is_killed_at_a_step",
    "was killed after step",
    **unmarked_late("write_objects"),
)


# What goes first
# ------------------------------------------------------------------------------------------------


def without_prefixes(right, store, batch, call):
    call.prefix_keys = ()
    return right(batch, call)


order = partial(files, where="Eviction")
order(
    "EV-3 HeadsFirst",
    "can be used",
    touch=lambda right, store, namespace, keys: right(namespace, keys[::-1]),
)
order("EV-3 ForgetsPrefixes", "written in several-calls", write_batch=without_prefixes)
order("EV-4 LookupsAreNoUse", "was used after every batch (exists)", use_found=always(None))
order("EV-4 ReadsAreNoUse", "was used after every batch (get)", use_read=always(None))
files(
    "EV-4 BelievesItsClock test_clocks_a_year_apart",
    "a year",
    now=lambda right, store: time.time_ns(),
)


# Places
# ------------------------------------------------------------------------------------------------


def unsealed(right, store, slot, write):
    """No envelope is kept, and one is made up for whatever is read."""
    right(slot, write)
    store.medium.slots[slot] = b"".join(write.buffers)


def read_slot(store, slot, read):
    held = b"" if slot is None else store.medium.slots[slot]
    sealed = ObjectWrite(read.namespace, read.key, [memoryview(held)])
    return len(held) == read.namespace.page_bytes and read.fill(held + sealed.envelope)


def looked_up_before(right, store, batch):
    """The places of a batch may have been given to other pages when they are read."""
    found = [store.find(read.namespace, read.key) for read in batch.reads]
    time.sleep(0.05)
    return [read_slot(store, slot, read) for slot, read in zip(found, batch.reads, strict=True)]


def noted(right, store, namespace, key):
    slot = right(namespace, key)
    if slot is not None:
        store.memo[namespace.name, key] = slot
    return slot


def from_the_noted(right, store, read):
    slot = store.memo.get((read.namespace.name, read.key))
    return read_slot(store, store.find(read.namespace, read.key) if slot is None else slot, read)


def none_given_back(right, store, namespace, pages):
    """A batch that is larger than the store takes every place, and fails."""
    given = right(namespace, pages)
    if len(given) < pages:
        raise KeyError("no free page")
    return given


def two_lost(right, store, namespace, pages):
    """A batch that does not fit costs two places for good."""
    given = right(namespace, pages)
    return given if len(given) == pages else given[:-2]


def under_writers(right, store, namespaces, call):
    """A clear gives back the places, too, that writers are about to write into."""
    right(namespaces, call)
    with store.medium.lock:
        store.medium.free += store.medium.reserved
        store.medium.reserved.clear()


LEASE_SECONDS = 0.25
"""Shorter than the suite holds up a writer (0.3 s)."""


def leased(right, store, namespace, pages):
    """A writer's place goes to the next one after a while, and nobody asks before it writes."""
    now, reserved = time.monotonic(), store.medium.reserved
    for slot in [slot for slot, since in reserved.items() if now - since > LEASE_SECONDS]:
        del reserved[slot]
        store.medium.free.append(slot)
    return right(namespace, pages)


slots("EV-2 ReusesSlots Eviction", "holds bytes of key", keep=unsealed, take_batch=looked_up_before)
slots(
    "EV-2 RemembersSlots Eviction",
    "holds bytes of key",
    keep=unsealed,
    find=noted,
    take=from_the_noted,
)
space = partial(slots, breaks="SET-5", where="Space")
space("BricksWhenFull", "and none was stored", reserve=none_given_back)
space("LeaksReservations", "takes no page", reserve=two_lost)
space(
    "DeletesForGood",
    "everything was deleted",
    forget=lambda right, store, place: store.medium.index.pop(place, None) is not None,
)


def looking(right, store, identity, config):
    right(identity, config)
    store.file = Path(config.path) / "pages"


def made(right, store):
    store.file.parent.mkdir(parents=True, exist_ok=True)
    store.file.touch()


MAY_HANG = replace(Slots.promises, may_hang=True, hung_reads=HungReads.BOUNCE_BUFFER)
ON_DISK = {"promises": MAY_HANG, "init": looking, "connect": made}
# Is the file still there?
ON_DISK["wait"] = lambda right, store: store.file.open().close()
held_up = partial(
    mutant,
    breaks="SET-1",
    message="was stored (True) while",
    base=Slots,
    injectors=("disk",),
    **ON_DISK,
)
right("SlotsOnDisk Stall", Slots, injectors=("disk",), **ON_DISK)
held_up("ClearsUnderWriters test_a_clear_in_the_middle_of_a_set", clear_namespaces=under_writers)
held_up("LeasesRunOut test_a_writer_that_is_held_up", reserve=leased)


# No room
# ------------------------------------------------------------------------------------------------


NEVER_EVICTS = {
    "promises": IN_PROCESS,
    "reserve": lambda right, store, namespace, pages: right(
        namespace, min(pages, len(store.medium.free))
    ),
}
right("NeverEvicts Space", Slots, **NEVER_EVICTS)
space(
    "DropsWhatDoesNotFit",
    "and a get misses it",
    write_objects=after(lambda answers: [[True] * len(some) for some in answers]),
    **NEVER_EVICTS,
)
