"""Engines in processes of their own, on one directory, whose load goes on while servers are
killed; and what is said of it.

Each makes calls with a deadline, of pages whose bytes tell which set wrote them, and tells both
ends of every call. What the calls answered is judged by the history checker of the conformance
suite.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from hicache_conformance.fixtures.process_group import ProcessGroup
from hicache_conformance.harness.pools import PoolShape
from hicache_conformance.history.checker import judge
from hicache_conformance.history.events import Call, Event
from hicache_conformance.model.case import Violation
from hicache_storage.layers import StorageOptions
from hicache_storage.spec import PoolName
from tests.conformance.records import case_context

IS_LONG = "HICACHE_SERVERS_SECONDS" in os.environ
"""Whether this is `make servers`, which has the machine to itself."""
DEADLINE_SECONDS = 3.0 if IS_LONG else 15.0
GRACE_SECONDS = 1.0 if IS_LONG else 10.0
"""FT-3 allows one second beyond the deadline."""
RETURN_SECONDS = 60.0
"""After this long with all servers back, an engine that has stored nothing has not come back."""
CHUNK = 8
"""Calls that an engine is told to make at a time."""
EPOCH_KEYS, EPOCH_SECONDS = 64, 2.0
"""All engines work on the same few keys for a while, then on others, so that pages of every time
are read at the end."""
MIX = {Call.SET: 5, Call.GET: 6, Call.EXISTS: 1, Call.DELETE: 1}
# The pages are small, because what is tried is the metadata, and the engines share two cores with
# the servers.
PAGES = {PoolName.KV: PoolShape(pages=48, components=(1_500, 2_500))}
NANOSECONDS = 1_000_000_000


class Engines(ProcessGroup):
    """The processes, and what they did."""

    def __init__(self, path, urls):
        config = {
            "path": str(path / "store"),
            "metadata_url": ",".join(urls),
            "file_size": "64MiB",
            "lease_seconds": 1.0,
            "wait_seconds": 0.2,
        }
        self.context = case_context(path, driver="hf3fs", config=config)
        super().__init__(self.context, PAGES)
        self._lock, self._epoch_until, self._began_at = threading.Lock(), 0.0, 0

    def engine(self, name):
        # Without a circuit breaker, so that every call reaches the servers.
        options = StorageOptions(deadline_seconds=DEADLINE_SECONDS, breaker_threshold=0)
        return self.worker(name, options=options)

    def close(self):
        self.context.opened.close()

    def work_beside(self, strikes):
        """Let all work until the strikes are over and every engine has stored something since."""
        self._began_at = time.monotonic_ns()
        with ThreadPoolExecutor(len(self.workers)) as threads:
            list(threads.map(partial(self._keep_busy, strikes), self.workers))

    def _keep_busy(self, strikes, peer):
        while not strikes.over_at or not self._is_back(peer, strikes.over_at):
            with self._lock:
                chunk = self._chunk()
            peer.start(chunk)
            peer.wait()

    def _is_back(self, peer, over_at):
        stored_at = [
            event.ended_at
            for event in peer.events
            if event.call is Call.SET and any(event.ended.done)
        ]
        if max(stored_at, default=0) >= over_at:
            return True
        late = time.monotonic_ns() > over_at + RETURN_SECONDS * NANOSECONDS
        assert not late, f"{peer.name} does not come back"
        return False

    def _chunk(self):
        if time.monotonic() > self._epoch_until:
            self._epoch_until = time.monotonic() + EPOCH_SECONDS
            self.new_keys(EPOCH_KEYS)
        # Mostly of this time; what is older has to be there, too.
        keys = (
            self.keys[-EPOCH_KEYS:]
            if self.context.random.random() < 0.8
            else self.context.random.sample(self.keys, EPOCH_KEYS)
        )
        return self.work(keys, MIX, calls=CHUNK, max_keys=8)

    def read_all(self):
        """A new engine asks for every key; its answers are the last of the history."""
        reader = self.engine("reader")
        for start in range(0, len(self.keys), 32):
            reader.get(self.keys[start : start + 32])

    def judge_all(self, outages):
        """Numbers of pages that were stored, and that were delivered.

        Raises:
            Violation: something was answered that cannot be: a page lost, or delivered after its
            removal, or a wrong byte. AssertionError: a call took too long, or an engine saw a
            damaged page.
        """
        events = self.events
        judged = [part for event in events for part in excused(event, outages)]
        try:
            judge(judged, self.identity, self.context.patterns, "SET-1", keeps=True)
        except Violation as violation:
            away = [f"{self._at(begin)} to {self._at(end)}" for begin, end in outages]
            violation.add_note(f"The store was away from {', '.join(away) or 'never'}.")
            raise
        late = [event for event in events if _seconds(event) > DEADLINE_SECONDS + GRACE_SECONDS]
        assert not late, [(event.call, round(_seconds(event), 2)) for event in late]
        self.expect_sound("GET-1")
        assert not any(one.stats().pages_evicted for one in self.workers if not one.ended)
        return (
            sum(sum(event.ended.done) for event in events if event.call is Call.SET),
            sum(found is not None for event in events for found in event.ended.found),
        )

    def _at(self, moment):
        return f"{(moment - self._began_at) / NANOSECONDS:.2f} s"


def overlaps(event, outages):
    """Whether the store was away at some moment of a call."""
    return any(event.began_at <= end and event.ended_at >= begin for begin, end in outages)


def excused(event, outages):
    """A call as it is judged. While the store is away, pages may be missed, and a delete that says
    `False` may be made later, or never."""
    if not overlaps(event, outages):
        return [event]
    begun, ended = event.begun, event.ended
    match event.call:
        case Call.GET:
            return [_only(event, [found is not None for found in ended.found])]
        case Call.EXISTS:
            keys = begun.keys[: ended.hit]
            return [Event(msgspec.structs.replace(begun, keys=keys), ended)]
        case Call.DELETE:
            not_done = [not ok for ok in ended.done]
            return [_only(event, ended.done), Event(_only(event, not_done).begun)]
        case _:
            return [event]


def _only(event, wanted):
    """A call as if it had been made for some of its keys alone."""

    def some(column):
        return tuple(entry for entry, ok in zip(column, wanted, strict=True) if ok)

    begun, ended = event.begun, event.ended
    columns = {
        name: some(getattr(ended, name)) for name in ("done", "found") if getattr(ended, name)
    }
    return Event(
        msgspec.structs.replace(begun, keys=some(begun.keys)),
        msgspec.structs.replace(ended, **columns),
    )


def _seconds(event):
    return (event.ended_at - event.began_at) / NANOSECONDS
