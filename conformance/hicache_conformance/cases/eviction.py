"""Eviction: how much stays, what goes first, and that nobody reads what took its place."""

from __future__ import annotations

import itertools
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import pytest

from hicache_conformance.fixtures import small_store
from hicache_conformance.fixtures.small_store import (
    BATCH,
    PAGE_BYTES,
    capacity_of,
    crowded,
    held,
    joined,
    press,
    shares,
)
from hicache_conformance.harness.concurrency import together
from hicache_conformance.harness.disk_usage import Footprint
from hicache_conformance.harness.oracle import drawn
from hicache_conformance.harness.page_patterns import short
from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Violation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from hicache_conformance.fixtures.context import Lab
    from hicache_conformance.harness.storage_under_test import Subject

FAULTS: Final = (Level.FAULTS,)
SETTLE_SECONDS: Final = 2.0
"""How long an eviction that goes on in the background may take to show in the counters."""
CHAIN: Final = 8


class EvictionCases:
    """EV-1 to EV-4, in one process."""

    @covers("EV-1", "OB-1", levels=FAULTS, needs=["evicts"])
    def test_capacity_is_kept(self, lab: Lab) -> None:
        """However much is written, what can be read and what lies on the disk stays within the capacity and one batch."""
        pages = 40
        config = lab.capped(capacity_of(pages))
        subject, stored, occupied = joined(lab, config), list[str](), 0
        for turn in range(lab.profile.crowds):
            stored += press(lab, subject, pages * 3 // 2, batch=lab.random.choice((1, BATCH, 2 * BATCH)))
            there = held(subject, stored, rule="EV-1")
            _within(there.count(True), pages, 2 * BATCH)
            if not any(there):
                raise Violation(
                    "EV-1", f"of {len(there)} pages, written into a store of {pages}, none is left: it evicts everything"
                )
            footprint = Footprint.of(config, lab.tmp)
            # What a store takes for itself is there after the first turn; from then on it does not grow.
            if turn and footprint and footprint.bytes > max(occupied, capacity_of(pages)) + 2 * BATCH * PAGE_BYTES:
                raise Violation(
                    "EV-1", f"{footprint.bytes} bytes lie on the disk after more writing, and {occupied} before; {_limit(pages)}"
                )
            if not turn and footprint:
                occupied = footprint.bytes
        _check_counted(subject, stored)

    @covers("EV-1", levels=FAULTS, needs=["evicts", "sharing>=process"])
    def test_several_writers_keep_the_capacity(self, lab: Lab) -> None:
        """Storages that write at the same time exceed the capacity by a batch each at most."""
        pages, config, identity = 40, lab.capped(capacity_of(40)), lab.identity()
        writers = [joined(lab, config, identity) for _ in range(3)]
        batches = [[lab.keys(BATCH, "other") for _ in range(pages // BATCH)] for _ in writers]

        def write(subject: Subject, mine: list[list[str]]) -> None:
            for keys in mine:
                subject.set(keys)

        together("EV-1", [partial(write, *pair) for pair in zip(writers, batches, strict=True)])
        there = held(writers[0], [key for mine in batches for keys in mine for key in keys], rule="EV-1")
        _within(there.count(True), pages, BATCH * len(writers))

    @covers("EV-1", levels=FAULTS, needs=["evicts", "sharing>=process"])
    def test_models_with_similar_names(self, lab: Lab) -> None:
        """Making room for a model takes no page of one with a similar name while older pages of an unlike one stay."""
        pages, config, base = 48, lab.capped(capacity_of(48)), lab.identity(model="b")
        # The oldest: a right driver that evicts other models' pages at all begins with these.
        unlike = joined(lab, config, lab.identity(model="quite/another"))
        old = lab.keys(BATCH)
        unlike.store(old)
        alike = {
            name: joined(lab, config, lab.identity(model=name, salt=base.salt))
            for name in ("a_b", "b_a", "a-b", "a/b", "bb", "B")
        }
        young = {name: lab.keys(BATCH) for name in alike}
        for name, subject in alike.items():
            subject.store(young[name])
        press(lab, joined(lab, config, base), 2 * pages)
        spared = all(held(unlike, old, rule="EV-1"))
        for name, subject in alike.items():
            for key, there in zip(young[name], held(subject, young[name], rule="EV-1"), strict=True):
                if spared and not there:
                    raise Violation(
                        "EV-1", f"model 'b' made room, and page key {short(key)} of model {name!r} is gone, "
                        "while older pages of model 'quite/another' are all there: it was taken for a page of 'b' by its name",
                    )  # fmt: skip

    @covers("EV-2", "GET-1", levels=FAULTS, needs=["evicts"])
    def test_pages_pushed_out_between_lookup_and_read(self, lab: Lab) -> None:
        """A reader that was told of pages gets their bytes or a miss, whatever was written between."""
        config, identity = lab.capped(capacity_of(24)), lab.identity()
        reader = joined(lab, config, identity)
        writer = joined(lab, config, identity) if shares(lab) else reader
        for turn in range(8 * lab.profile.crowds):
            chain = lab.keys(BATCH)
            (writer if turn % 2 else reader).set(chain)
            told = chain[: reader.exists(chain).kv_hit_pages]
            press(lab, writer, lab.random.randint(1, 40), batch=lab.random.choice((1, BATCH, 2 * BATCH)))
            held(reader, told, rule="EV-2")

    @covers("EV-2", "GET-1", levels=FAULTS, needs=["evicts"])
    def test_reads_while_others_push_pages_out(self, lab: Lab) -> None:
        """Two threads look up and read what two others write into a store that is always full."""
        config, identity = lab.capped(capacity_of(24)), lab.identity()
        subjects = (
            [joined(lab, config, identity) for _ in range(4)] if shares(lab) else _lanes(lab, joined(lab, config, identity))
        )
        recent, reading = [lab.keys(BATCH) for _ in range(4)], [True, True]
        for chain in recent:
            subjects[0].set(chain)

        def write(subject: Subject, writer: int) -> None:
            for number in itertools.takewhile(lambda _: reading, itertools.count()):
                chain = [f"writer{writer}-{number}-{page}" for page in range(BATCH)]
                subject.set(chain)
                recent.append(chain)

        def read(subject: Subject, random: Random) -> None:
            try:
                for _ in range(lab.profile.thread_calls):
                    chain = random.choice(recent[-8:])
                    told = chain[: subject.exists(chain).kv_hit_pages]
                    held(subject, told, rule="EV-2")
            finally:
                reading.pop()

        writers = [partial(write, subject, number) for number, subject in enumerate(subjects[:2])]
        readers = [partial(read, subject, lab.chance(f"reader {number}")) for number, subject in enumerate(subjects[2:])]
        together("EV-2", [*writers, *readers])

    @covers("EV-3", levels=FAULTS, needs=["evicts"])
    @pytest.mark.parametrize("manner", ["one-call", "several-calls", "looked-up", "read"])
    def test_tails_go_before_heads(self, lab: Lab, manner: str) -> None:
        """Of a chain that is partly pushed out, what is left is its beginning."""
        pages = 16
        # From "all of the chain fits" to "none of it does": one of these is in between, whatever a page takes.
        for pressure in range(2 + lab.random.randrange(3), pages + CHAIN // 2, 2):
            subject, chain = crowded(lab, pages), lab.keys(CHAIN)
            _write_chain(lab, subject, chain, manner)
            press(lab, subject, pressure, batch=1)
            left = held(subject, chain, rule="EV-3")
            usable = left.index(False) if False in left else CHAIN
            if any(left[usable:]):
                raise Violation(
                    "EV-3", f"a chain of {CHAIN} pages, written in {manner}, was pressed by {pressure} others in a store of {pages}: "
                    f"left of it is {drawn(left)}, so that only {usable} of the {sum(left)} pages left can be used",
                )  # fmt: skip
            subject.call("close", subject.storage.close)

    @covers("EV-4", levels=FAULTS, needs=["evicts"])
    @pytest.mark.parametrize("use", ["get", "exists"])
    def test_what_is_used_stays(self, lab: Lab, use: str) -> None:
        """Pages that are read or found again and again stay, while newer ones that nobody uses go."""
        pages = 24
        subject, warm = crowded(lab, pages), lab.keys(lab.random.randint(2, BATCH))
        subject.store(warm)
        others = list[str]()
        for _ in range(2 * pages // BATCH):
            others += press(lab, subject, BATCH)
            if use == "get":
                there = held(subject, warm, rule="EV-4")
            else:
                hit = subject.exists(warm).kv_hit_pages
                there = [page < hit for page in range(len(warm))]
            if not all(there):
                newer = held(subject, others, rule="EV-4").count(True)
                raise Violation(
                    "EV-4", f"page {there.index(False)} key {short(warm[there.index(False)])} was used after every batch ({use}), and is "
                    f"evicted after {len(others)} newer pages that nobody used, {newer} of which are there",
                )  # fmt: skip


def _lanes(lab: Lab, subject: Subject) -> list[Subject]:
    return [subject.lane(number, 4, lab.chance(f"places {number}")) for number in range(4)]


def _write_chain(lab: Lab, subject: Subject, chain: Sequence[str], manner: str) -> None:
    if manner == "several-calls":
        for start in range(0, CHAIN, 2):
            small_store.set_behind(subject, chain[:start], chain[start : start + 2])
            if start == CHAIN // 2:
                press(lab, subject, 1)
        return
    subject.store(chain)
    if manner == "looked-up":
        subject.exists(chain)
    elif manner == "read":
        subject.expect(chain)


def _limit(pages: int) -> str:
    return f"the capacity is {capacity_of(pages)}"


def _within(there: int, pages: int, batch: int) -> None:
    if there * PAGE_BYTES > capacity_of(pages) + batch * PAGE_BYTES:
        raise Violation("EV-1", f"{there} pages of {PAGE_BYTES} bytes can be read; {_limit(pages)}, and a batch is {batch} pages")


def _check_counted(subject: Subject, stored: Sequence[str]) -> None:
    """The pages that are gone are those that were counted as evicted."""
    until = time.monotonic() + SETTLE_SECONDS
    while True:
        gone = held(subject, stored, rule="EV-1").count(False)
        counted = subject.stats().pages_evicted
        if gone == counted:
            return
        if time.monotonic() > until:
            raise Violation("OB-1", f"{gone} of {len(stored)} stored pages were evicted, and pages_evicted is {counted}")
        time.sleep(0.05)
