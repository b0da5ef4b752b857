"""Faults of several processes on a directory, and of drivers on a disk that fails."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import threading
import time
from dataclasses import replace
from functools import partial
from random import Random
from uuid import uuid4

from drivers_files import BUFFERED, PAGE, Files, SteadyFiles
from mutant import after, always, mutant, right

from hicache_storage.objects import ObjectWrite
from hicache_storage.spec import Sharing, StorageUnavailableError

files, disk = partial(mutant, base=Files), partial(mutant, base=SteadyFiles)
ONE_PROCESS = replace(Files.promises, sharing=Sharing.PROCESS)
CANNOT_HANG = replace(BUFFERED, may_hang=False)
BELOW = "Fault Deadline Plan BitRot Applied FailedClear Stall Directory Process"
right(f"SteadyFiles {BELOW}", SteadyFiles, injectors=("disk",))


def pause(milliseconds=2.0):
    """As if the disk were slow: the races of the faults are long enough to be met."""
    time.sleep(Random().uniform(0.3, 1.0) * milliseconds / 1000)


def trusting(right, store, read):
    """Nothing is verified, so that a fault reaches the reader as bytes."""
    done = right(read)
    read.damaged = False
    # Sealed here and not where it was written, an envelope says nothing.
    read.envelope = ObjectWrite(read.namespace, read.key, read.buffers).envelope
    return done


# Whole or not at all
# ------------------------------------------------------------------------------------------------


def in_place(right, store, write, call):
    """Room is made for the page under its own name, then it is filled."""
    path, content = store.path(write.namespace, write.key), write.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb", buffering=0) as file:
        file.truncate(len(content))
        for start in range(0, len(content), 8192):
            file.write(content[start : start + 8192])
            pause(20)
    return True


def named_too_soon(right, store, write, call):
    """The page gets its name when half of its bytes are there."""
    path, content = store.path(write.namespace, write.key), write.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft, half = store.draft(path), len(content) // 2
    with draft.open("wb", buffering=0) as file:
        file.truncate(len(content))
        file.write(content[:half])
        draft.rename(path)
        pause(20)
        file.write(content[half:])
    return True


def in_two_steps(right, store, draft, write):
    content = write.tobytes()
    with draft.open("wb", buffering=0) as file:
        file.truncate(len(content))
        file.write(content[: len(content) // 2])
        pause(4)
        file.write(content[len(content) // 2 :])


def if_it_is_there(right, store, draft, path, write):
    with contextlib.suppress(FileNotFoundError):
        right(draft, path, write)


def if_it_is_new(right, store, draft, path, write):
    pause(4)
    if not path.exists() or write.replaces:
        right(draft, path, write)


races = partial(files, where="Process")
# Whether a reader meets half of the page, or nothing where a page was, is up to the moment.
races("SET-2 WritesInPlace", "SET-2: ", put=in_place, discard=always(None))
races("SET-2 RenamesTooSoon", "holds zeros", put=named_too_soon, take=trusting)
races(
    "SET-4 OneDraftForAll",
    "SET-4: ",
    fill_draft=in_two_steps,
    publish=if_it_is_there,
    draft=lambda right, store, path: path.with_suffix(".draft"),
    tidy=always(None),
)
races("SET-4 LosersLeaveDrafts", "made the store grow by", publish=if_it_is_new, tidy=always(None))


# What others do
# ------------------------------------------------------------------------------------------------


def no_more_known(right, store, write, call):
    store.seen.discard(store.path(write.namespace, write.key))
    return right(write, call)


def there_for_good(right, store, namespace, key):
    path = store.path(namespace, key)
    if right(namespace, key):
        store.seen.add(path)
    return path in store.seen


def forgotten(right, store, path):
    store.seen.discard(path)
    return right(path)


def bad_for_good(right, store, read):
    path = store.path(read.namespace, read.key)
    done = path not in store.seen and right(read)
    if done and not read.verify():
        store.seen.add(path)
    return done


def unmarked_late(*steps):
    """A file beside each page says that it is there, and goes when the whole batch has gone.

    At the end of a delete, of a clear, and of `steps`.
    """

    def mark(path):
        return path.with_suffix(".there")

    def publish(right, store, draft, path, write):
        right(draft, path, write)
        mark(path).touch()

    def remove(right, store, path):
        store.memo.setdefault("removed", []).append(mark(path))
        return right(path)

    def unmarking(right, store, *arguments):
        answer = right(*arguments)
        for gone in store.memo.pop("removed", ()):
            gone.unlink(missing_ok=True)
        return answer

    return {
        "there": lambda right, store, namespace, key: mark(store.path(namespace, key)).exists(),
        "publish": publish,
        "remove": remove,
        **dict.fromkeys(("delete_objects", "clear_namespaces", *steps), unmarking),
    }


shared = partial(files, where="Sharing")
shared(
    "SET-1 TrustsItsList",
    "is said to exist, and it had been removed",
    there=there_for_good,
    remove=forgotten,
)
shared(
    "ID-2 SaltsItsKeys",
    "answers False",
    path=lambda right, store, namespace, key: (
        store.root / namespace.name / f"{hash(key) & (1 << 64) - 1:016x}{PAGE}"
    ),
)
shared(
    "SET-3 NeverForgetsDamage",
    "a get of process one answers False",
    take=bad_for_good,
    put=no_more_known,
)
files(
    "SET-1 DiscardsBlindly CorruptObject",
    "a get answers False",
    discard=lambda right, store, read: store.remove(store.path(read.namespace, read.key)),
)
files(
    "FT-5 UnmarksLate test_a_delete_is_killed_at_a_step test_a_clear_is_killed_at_a_step",
    "was killed after step",
    every_case=True,
    **unmarked_late(),
)


# Numbered files
# ------------------------------------------------------------------------------------------------


def counted_on(right, store, draft, path, write):
    """Pages lie in numbered files, and each has a link to its own.

    The storage looks once which numbers there are.
    """
    pages = store.root / "pages"
    pages.mkdir(exist_ok=True)
    numbers = store.memo.setdefault("numbers", itertools.count(len(os.listdir(pages))))
    draft.symlink_to(draft.rename(pages / str(next(numbers))))
    right(draft, path, write)


# Whether a reader meets another's bytes or a page half written is up to the moment.
races(
    "CC-2 ReadsInTwoSteps",
    "CC-2: ",
    take=trusting,
    content=lambda right, store, path: halves(right(path), pause(10), right(path)),
)
files(
    "GET-1 GoesOnCounting test_a_store_that_is_deleted_and_opened_anew",
    "holds bytes of key",
    publish=counted_on,
    take=trusting,
)


def halves(one, _, two):
    return one and two and one[: len(one) // 2] + two[len(two) // 2 :]


# Death
# ------------------------------------------------------------------------------------------------


def published_late(right, store, draft, path, write):
    """Every twelfth page publishes those before it, which this process alone knows till then."""
    store.shared[path] = draft
    if len(store.shared) >= 12:
        publish_all(store)


def publish_all(store):
    for path, draft in list(store.shared.items()):
        draft.rename(path)
        store.shared.pop(path, None)


def from_the_drafts(right, store, path):
    with contextlib.suppress(FileNotFoundError):
        return store.shared[path].read_bytes() if path in store.shared else right(path)
    return right(path)


def slow_draft(right, store, draft, write):
    right(draft, write)
    # Nearly all the time that a set takes, on a busy machine too, so that nearly every kill meets
    # it here.
    time.sleep(0.08)


def lock_file(right, store, write, call):
    """The store is locked with a file that a killed writer does not remove."""
    lock = store.root / "lock"
    for _ in range(20):
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
            break
        except FileExistsError:
            time.sleep(0.001)
    else:
        return False
    try:
        pause(4)
        return right(write, call)
    finally:
        lock.unlink()


killed = partial(files, breaks="FT-5", where="Durability")
killed(
    "PublishesLateOn",
    "was stored (True) and removed by nobody",
    promises=ONE_PROCESS,
    publish=published_late,
    tidy=always(None),
    content=from_the_drafts,
    there=lambda right, store, namespace, key: (
        store.path(namespace, key) in store.shared or right(namespace, key)
    ),
    remove=lambda right, store, path: (
        store.shared.pop(path, path).unlink(missing_ok=True) or right(path)
    ),
    disconnect=lambda right, store: (publish_all(store), right()),
)
files(
    "FT-5 CollectsNoDrafts test_killed_writers_leave_no_litter",
    ".draft (64064 bytes)",
    fill_draft=slow_draft,
    collect=always(None),
)
killed("LeavesItsLock", "was refused to process", put=lock_file)


# Disks that fail
# ------------------------------------------------------------------------------------------------


def raised(right, store, transfers, *more):
    for transfer in transfers:
        for key in transfer.keys or ():
            store.content(store.path(store.pools[transfer.name].namespace, key))
    return right(transfers, *more)


def resting(right, store, batches, call):
    """After three sets that the disk has refused it leaves the disk alone, gets included."""
    store.memo["refused"] = store.memo.get("refused", 0) + 1
    answers = right(batches, call)
    store.memo["refused"] = 0
    return answers


def trying(right, store):
    right()
    (store.root / "probe").write_bytes(b"probe")


def full_is_no_fault(right, store, batches, call):
    try:
        return right(batches, call)
    except OSError:
        return [[False] * len(batch.writes) for batch in batches]


def collector_last(right, store):
    """A file is opened, then a thread started; where that fails, nobody closes the file."""
    right()
    store.memo["log"] = os.open(store.root / "log", os.O_CREAT | os.O_WRONLY)
    threading.Thread(target=int).start()


def noted_too_soon(right, store, write, call):
    """A page is noted before it is written, and the note taken back where an `Exception` comes."""
    path = store.path(write.namespace, write.key)
    store.seen.add(path)
    try:
        return right(write, call)
    except Exception:
        store.seen.discard(path)
        raise


def logged(right, store, read):
    try:
        return right(read)
    except OSError as error:
        logging.getLogger("sample").warning("cannot read %s: %s", read.key, error)
        store.recorder.count_fault()
        return False


def torn_is_an_error(right, store, read):
    """A file of the wrong length exists, cannot be read, and is not written again."""
    content = store.content(store.path(read.namespace, read.key))
    if content is not None and len(content) != read.namespace.object_bytes:
        raise OSError(errno.EIO, "a short file")
    return read.fill(content)


def straight_into_the_pool(right, store, read):
    path, wanted = store.path(read.namespace, read.key), read.namespace.object_bytes
    with contextlib.suppress(FileNotFoundError), path.open("rb", buffering=0) as file:
        whole = os.fstat(file.fileno()).st_size == wanted
        return whole and os.readv(file.fileno(), read.parts) == wanted
    return False


def padded(right, store, read):
    """A page that is shorter than it should be is filled up with zeros."""
    content = store.content(store.path(read.namespace, read.key))
    return trusting(
        lambda read: (
            content is not None and read.fill(content.ljust(read.namespace.object_bytes, b"\0"))
        ),
        store,
        read,
    )


def verifying_nothing(right, store, identity, config):
    right(identity, config)
    store._verifies_checksums = False


def opening_for_good(right, store):
    """`open()` waits until its directory is there."""
    while True:
        try:
            return right()
        except OSError:
            time.sleep(0.02)


def watched(right, store, batches, call):
    """A thread watches each read, and ends only when all was read."""
    done = threading.Event()
    threading.Thread(target=done.wait, name="watches-a-read", daemon=True).start()
    answers = right(batches, call)
    # Not `call.expired()`: a read that the deadline has ended may be told a moment before it.
    if all(map(all, answers)):
        done.set()
    return answers


def lost(right, store, write, call):
    """True is answered first and written later; what cannot be written then is lost."""
    with contextlib.suppress(OSError):
        right(write, call)
    return True


tried = partial(disk, where="test_a_trouble_is_a_miss")
nothing = partial(disk, breaks="FT-7", where="test_a_store_that_takes_nothing", injectors=("disk",))
tried("FT-1 RaisesWhatTheDiskRaises", "batch_get_v2 raised OSError", get=raised)
tried("FT-1 LogsEachPage", "was logged in", take=logged)
nothing(
    "RestsWhenFull",
    "0 of 12 stored pages are found after 3 sets were refused",
    write_objects=resting,
    take=lambda right, store, read: store.memo.get("refused", 0) < 3 and right(read),
)
nothing("TriesItsDirectory", "open raised StorageUnavailableError", connect=trying)
nothing(
    "HidesThatItIsFull",
    "sets were refused (disk: ENOSPC at create or write or name), and Health",
    write_objects=full_is_no_fault,
)
disk(
    "FT-6 StartsItsCollectorLast test_the_process_is_at_its_limit[threads]",
    "store/log)",
    promises=CANNOT_HANG,
    connect=collector_last,
    disconnect=lambda right, store: os.close(store.memo["log"]),
)
disk("FT-6 LeavesDrafts test_failing_sets_leave_nothing", "files behind", tidy=always(None))
disk(
    "SET-1 NotesPagesTooSoon test_sets_are_interrupted",
    "below the driver: a KeyboardInterrupt after step",
    put=noted_too_soon,
    there=lambda right, store, namespace, key: (
        store.path(namespace, key) in store.seen or right(namespace, key)
    ),
    remove=forgotten,
)
disk(
    "EX-9 PoisonedByTornFiles BitRot",
    "it goes on existing",
    there=lambda right, store, namespace, key: store.path(namespace, key).exists(),
    take=torn_is_an_error,
)
disk(
    "SET-8 WritesInPlaceLate test_calls_of_a_hung_store_are_over",
    "what its writer put into the host page",
    put=in_place,
)
disk(
    "GET-9 ReadsLate test_calls_of_a_hung_store_are_over",
    "was written after the get",
    take=straight_into_the_pool,
)
tried("GET-1 ShortReadsAreHits", "holds zeros", take=padded)
tried("SET-1 LosesTheQueue", "was stored (True), and a get answers False", put=lost)
disk(
    "SET-6 OnePageFailsAll test_one_page_fails",
    "one page of 12 could not be written",
    set=after(
        lambda answers: {
            pool: some if all(some) else [False] * len(some) for pool, some in answers.items()
        }
    ),
)
disk(
    "FT-3 OpensForAsLongAsItTakes test_a_store_that_is_away",
    "open has not come back",
    promises=CANNOT_HANG,
    connect=opening_for_good,
)
disk(
    "LC-2 LeavesAThreadBehind test_closing_a_hung_store",
    "thread 'watches-a-read'",
    read_objects=watched,
)
disk("GET-1 TrustsTheDisk test_stored_bytes_rot", "bytes differ", init=verifying_nothing)


# Answers that say less than they are taken for
# ------------------------------------------------------------------------------------------------


TICK_NS = 50_000_000


def listed(store, directory, index):
    """What `index` makes of the pages' paths; a directory without a change is not listed again.

    A listing for each key would be a second fault, in the time of a lookup.
    """
    try:
        changed = directory.stat().st_mtime_ns
    except FileNotFoundError:
        return {}
    known, found = store.memo.get(directory, (0, {}))
    if changed != known:
        found = index(sorted(directory.glob(f"*{PAGE}")))
        # Another change in the same tick of the file system's clock leaves the time as it is.
        if time.time_ns() - changed > TICK_NS:
            store.memo[directory] = changed, found
    return found


def last_of_each_number(paths):
    numbers = {}
    for path in paths:
        # Empty files are strangers.
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size:
                numbers[path.name.rpartition("-")[0]] = path.name
    return {name.rpartition("-")[2]: name for name in numbers.values()}


def numbered(right, store, namespace, key):
    """A file has its writer's number in its name; of two files of one number the last counts."""
    plain = right(namespace, key)
    writer = store.memo.setdefault("writer", uuid4().hex[:8])
    own = f"{writer}-{store.memo.get('next', 0):06}-{plain.name}"
    names = listed(store, plain.parent, last_of_each_number)
    return plain.with_name(names.get(plain.name, own))


def with_length(right, store, namespace, key):
    """A file has the length of its page in its name; the longest is taken for the page."""
    plain = right(namespace, key)
    names = listed(
        store,
        plain.parent,
        lambda paths: {path.name.rpartition("-")[0]: path.name for path in paths},
    )
    return plain.with_name(
        names.get(plain.stem, f"{plain.stem}-{namespace.object_bytes:08x}{PAGE}")
    )


def next_number(right, store, write, call):
    """The number of a rename that failed goes to the next file."""
    with store.memo.setdefault("turn", threading.RLock()):
        done = right(write, call)
        store.memo["next"] = store.memo.get("next", 0) + 1
    return done


def all_numbers(right, store, batches, call):
    # Two processes that set a page at once have each numbered a file for it.
    deleted = right(batches, call)
    for batch in batches:
        for key in batch.keys:
            while store.remove(store.path(batch.namespace, key)):
                pass
    return deleted


def clearing(then):
    def clear(right, store):
        try:
            right()
        except StorageUnavailableError as error:
            then(error)

    return clear


def refuse(error):
    raise OSError(f"cannot clear: {error}") from error


def counting_faults(right, store, transfers, *more):
    """After three calls in a row during which the store failed, everything is refused."""
    before = store.fault_count()
    answer = right(transfers, *more)
    with store.memo.setdefault("turn", threading.Lock()):
        row = store.memo["row"] = (store.memo.get("row", 0) + 1) * (store.fault_count() > before)
        if row >= 3:
            store.memo["until"] = time.monotonic() + 30.0
    return answer


def refused_for_30_s(right, store, keys, *more, **named):
    refused = time.monotonic() < store.memo.get("until", 0.0)
    return right([] if refused else keys, *more, **named)


def as_it_is_told(right, store, keys, pool_transfers=None, extra_info=None):
    """The deadline of a lookup goes to a lock as it is."""
    turn = store.memo.setdefault(("turn", os.getpid()), threading.Lock())
    seconds = None if extra_info is None else extra_info.deadline_seconds
    mine = turn.acquire(timeout=60.0 if seconds is None else seconds)
    try:
        return right(keys if mine else [], pool_transfers, extra_info)
    finally:
        if mine:
            turn.release()


def one_at_a_time(right, store, *lookup, **named):
    """A child inherits the lock as it was."""
    with store.memo.setdefault("turn", threading.Lock()):
        # Not longer: a call that hangs would hold up the others, which is another fault.
        time.sleep(0.001)
    return right(*lookup, **named)


def there_or_absent(right, store, namespace, key):
    """While its directory is not there, the storage believes in what it has written since."""
    if store.root.exists():
        return right(namespace, key)
    if "absent" not in store.memo:
        store.memo["absent"] = True
        store.seen.clear()
    return store.path(namespace, key) in store.seen


def if_done(right, store, write, call):
    done = right(write, call)
    if done:
        store.seen.add(store.path(write.namespace, write.key))
    return done


unclear = partial(disk, injectors=("disk",))
unclear(
    "SET-1 ReusesNumbers test_requests_that_took_effect_and_failed",
    "after it took effect",
    path=numbered,
    put=next_number,
    delete_objects=all_numbers,
)
refused = partial(unclear, breaks="LC-7", where="test_a_clear_that_is_refused")
refused("SwallowsFailedClears", "by a clear() that returned", clear=clearing(lambda error: None))
refused("RaisesWhatStopsAClear", "which is no StorageUnavailableError", clear=clearing(refuse))
unclear(
    "FT-4 OneFaultForAll test_one_fault_beside_calls_that_succeed",
    "exists finds 0 of 4 pages",
    set=counting_faults,
    exists=refused_for_30_s,
)
unclear(
    "FT-1 WaitsAsItIsTold test_unusual_deadlines_of_a_working_store",
    "batch_exists_v2 with deadline_seconds",
    exists=as_it_is_told,
)
unclear(
    "LC-5 KeepsItsLockOverForks test_children_forked_during_calls", "hung for", exists=one_at_a_time
)
unclear(
    "FT-4 ComparesAbsence test_a_store_that_is_deleted_and_made_again",
    "there is no file in its directory",
    there=there_or_absent,
    put=if_done,
)
unclear(
    "SET-1 BelievesFileNames test_strangers_with_names_like_the_store_s_own",
    "and a get answers False",
    path=with_length,
)
