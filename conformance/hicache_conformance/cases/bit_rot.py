"""Bytes that changed or went missing below a driver while nobody looked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from hicache_conformance.fixtures.fault_calls import UNGUARDED, check_hits, deadline_on, hurry, working
from hicache_conformance.harness.corruption import Decay, let_rot
from hicache_conformance.harness.page_patterns import Page, short
from hicache_conformance.injectors.disk import DiskGround
from hicache_conformance.injectors.servers import ServicesGround
from hicache_conformance.model.case import covers
from hicache_conformance.model.fault_plan import Fault, FaultKind, FaultPlan
from hicache_conformance.model.requirements import declares
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import NotPromised, Untestable, Violation
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from random import Random

    from hicache_conformance.fixtures.context import Lab
    from hicache_conformance.harness.storage_under_test import Subject
    from hicache_conformance.injectors.injector import Ground

FAULTS: Final = (Level.FAULTS,)
PAGES: Final = 6


class RotCases:
    """GET-7, EX-9, SET-3 and FT-6 for damage that is done below the driver, not through it."""

    @covers("GET-7", "EX-9", "SET-3", "FT-6", "FT-1", "GET-1", levels=FAULTS)
    @pytest.mark.parametrize("decay", list(Decay), ids=lambda decay: decay.replace(" ", "-"))
    def test_stored_bytes_rot(self, lab: Lab, ground: Ground, decay: Decay) -> None:
        """Stored pages rot: none is delivered wrong, none raises, none found damaged goes on existing, and a set repairs them all."""
        subject, keys = working(lab, ground, pages=PAGES)
        _check_verified(subject)
        subject = _damaged(lab, ground, subject, keys, decay)
        before = subject.stats().pages_damaged
        subject.exists(keys)
        check_hits(subject, keys, subject.get(keys), f"{ground.name}: {decay}")
        found = subject.get(keys)
        check_hits(subject, keys, found, f"{ground.name}: {decay}")
        # What is lost on its way, or by a server that looks itself, the driver never sees.
        sees = ground.name in ("disk", "objects")
        if sees and decay is Decay.FLIPPED and None in found and subject.stats().pages_damaged == before:
            raise Violation(
                "GET-7",
                f"stored bytes were changed below the driver, a get answers {found.count(None)} misses and counts none as damaged",
            )
        for index, (key, content) in enumerate(zip(keys, found, strict=True)):
            if content is None and subject.has(key):
                raise Violation(
                    "EX-9",
                    f"a get does not deliver page {index} key {short(key)} ({decay} below the driver), and it goes on existing",
                )
        for index, (key, ok) in enumerate(zip(keys, subject.set(keys), strict=True)):
            if not ok:
                raise Violation(
                    "SET-3", f"page {index} key {short(key)} was lost ({decay} below the driver), and a set of it answers False"
                )
        subject.expect(keys, rule="SET-3")


def _damaged(lab: Lab, ground: Ground, subject: Subject, keys: list[str], decay: Decay) -> Subject:
    """The storage, or another one of its identity, over pages that have rotted."""
    if isinstance(ground, ServicesGround):
        with ground.stopped() as directory:
            if not let_rot(directory, _contents(lab, subject, keys), decay, lab.chance("rot")):
                raise NotPromised("its servers keep no page in a file as it is, so that none can be damaged for certain")
        return subject
    if not isinstance(ground, DiskGround):
        # What can rot is what the store keeps: here it is written wrong from the start, and answered as written.
        keys[:] = lab.keys(PAGES)
        hurry(subject, deadline_on(ground))
        ground.strike(FaultPlan(ground.name, (_on_its_way(ground, decay, lab.chance("rot")),)))
        subject.set(keys)
        ground.heal()
        hurry(subject, None)
        return subject
    reopens = declares(lab.capabilities, "durability>=reopen")
    if reopens:
        subject.call("close", subject.storage.close)
    if not let_rot(ground.backing, _contents(lab, subject, keys), decay, lab.chance("rot")):
        raise Untestable("no file of the store contains the bytes of a page as they are, so that none can be damaged for certain")
    if reopens:
        subject = lab.storage(subject.identity, options=UNGUARDED)
    return subject


def _contents(lab: Lab, subject: Subject, keys: list[str]) -> list[bytes]:
    memory = subject.memories[PoolName.KV]
    return [lab.book.render(Page(subject.identity, PoolName.KV, key), memory.page_bytes) for key in keys]


def _on_its_way(ground: Ground, decay: Decay, random: Random) -> Fault:
    """What does to pages that are being written what a decay does to those that were."""
    flips, objects = decay is Decay.FLIPPED, ground.name == "objects"
    kind = FaultKind.BIT_FLIP if flips else FaultKind.TORN_WRITE if objects else FaultKind.CUT
    return Fault(kind=kind, operations=("write" if objects else "request",), place=round(random.uniform(0.2, 0.95), 4))


def _check_verified(subject: Subject) -> None:
    if not subject.call("get_stats", subject.storage.get_stats).verifies_checksums:
        raise Untestable("the options leave checksums unverified, as get_stats() says; nothing can notice damaged bytes")
