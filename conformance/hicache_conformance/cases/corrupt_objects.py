"""Damaged objects: never delivered, gone once seen, repaired by the next set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hicache_conformance.harness.corruption import Damage
from hicache_conformance.harness.log_records import records_above_debug
from hicache_conformance.harness.page_patterns import short
from hicache_conformance.model.case import covers
from hicache_conformance.model.violation import Untestable, Violation

if TYPE_CHECKING:
    from hicache_conformance.fixtures.context import Lab
    from hicache_conformance.harness.storage_under_test import Subject

ALL_DAMAGES = pytest.mark.parametrize("damage", list(Damage), ids=lambda damage: damage.replace(" ", "-"))
WRONG_LENGTHS = (Damage.SHORT, Damage.LONG)
BY_CHECKSUM = (Damage.FLIPPED_BIT, *WRONG_LENGTHS)
"""Damages that only the checksum tells for certain: a store of fixed places keeps a wrong length as wrong bytes."""


class DamageCases:
    """GET-5, GET-7, EX-9 and the repairing half of SET-3."""

    @covers("GET-5", "GET-1", damages=True)
    @ALL_DAMAGES
    def test_damaged_pages_are_not_delivered(self, lab: Lab, damage: Damage) -> None:
        """An object of the wrong length, owner, key or checksum is answered with False."""
        subject, key = lab.storage(), lab.keys(1)[0]
        _plant(lab, subject, key, damage)
        content = subject.get([key])[0]
        if content is not None:
            raise Violation(
                "GET-5", f"page 0 key {short(key)} is damaged ({damage}), and a get delivers it: {subject.explain(key, content)}"
            )

    @covers("GET-3", "SET-6", damages=True)
    def test_damage_in_the_middle_of_a_batch(self, lab: Lab) -> None:
        """The pages around a damaged one are delivered, and a set over all of them stores all."""
        subject, keys = lab.storage(), lab.keys(7)
        subject.store(keys[:3] + keys[4:])
        _plant(lab, subject, keys[3], Damage.FLIPPED_BIT)
        found = subject.get(keys)
        if found[3] is not None:
            raise Violation(
                "GET-5", f"page 3 key {short(keys[3])} is damaged, and a get delivers it: {subject.explain(keys[3], found[3])}"
            )
        subject.compare(keys[:3] + keys[4:], found[:3] + found[4:], rule="GET-3")
        for index, ok in enumerate(subject.set(keys)):
            if not ok:
                rule = "SET-3" if index == 3 else "SET-6"
                raise Violation(rule, f"page {index} key {short(keys[index])} was refused in a batch around a damaged page 3")
        subject.expect(keys, rule="SET-6")

    @covers("GET-7", damages=True)
    def test_damage_is_counted_and_told_once(self, lab: Lab) -> None:
        """Two reads of a damaged page: one line in the log, one page counted as damaged."""
        subject, key, sound = lab.storage(), lab.keys(1)[0], lab.keys(2)
        # A driver may have something to say about its first reads that has nothing to do with damage.
        subject.store(sound)
        subject.expect(sound)
        _plant(lab, subject, key, Damage.FLIPPED_BIT)
        before = subject.stats().pages_damaged
        with records_above_debug() as records:
            subject.get([key])
            counted = subject.stats().pages_damaged - before
            subject.get([key])
        if counted != 1:
            raise Violation("GET-7", f"a get found page 0 key {short(key)} damaged, and counted {counted} damaged pages")
        if len(records) != 1:
            told = [record.getMessage() for record in records]
            raise Violation("GET-7", f"page 0 key {short(key)} is damaged; two reads of it logged {len(records)} lines: {told}")

    @covers("GET-7", "EX-9", damages=True)
    @ALL_DAMAGES
    def test_a_page_found_damaged_stops_existing(self, lab: Lab, damage: Damage) -> None:
        """What a read has found damaged is a miss for exists too, and for every later read."""
        subject, key = lab.storage(), lab.keys(1)[0]
        _plant(lab, subject, key, damage)
        subject.get([key])
        if subject.has(key):
            raise Violation("EX-9", f"a read found page 0 key {short(key)} damaged ({damage}), and it goes on existing")
        if subject.get([key])[0] is not None:
            raise Violation("GET-7", f"page 0 key {short(key)} was found damaged ({damage}), and a later get delivers it")

    @covers("SET-3", "GET-7", damages=True)
    @ALL_DAMAGES
    def test_a_set_repairs_what_a_read_found(self, lab: Lab, damage: Damage) -> None:
        """After a read has found a page damaged, a set of its key stores it."""
        subject, key = lab.storage(), lab.keys(1)[0]
        _plant(lab, subject, key, damage)
        subject.get([key])
        _repair(subject, key, damage)


def _plant(lab: Lab, subject: Subject, key: str, damage: Damage) -> None:
    if (
        damage in BY_CHECKSUM
        and lab.dialect.promises is None
        and not subject.call("get_stats", subject.storage.get_stats).verifies_checksums
    ):
        raise Untestable("the options leave checksums unverified, as get_stats() says; nothing can notice damaged bytes")
    held = lab.damage(subject, key, damage)
    # A store of fixed places cannot hold another length; then there is nothing, and nothing is what a get must find.
    if not held and damage not in WRONG_LENGTHS:
        raise Untestable(f"the driver could not be made to hold a page with {damage}; override tamper()")


def _repair(subject: Subject, key: str, damage: Damage) -> None:
    if subject.set([key]) != [True]:
        raise Violation("SET-3", f"page 0 key {short(key)} is damaged ({damage}), and a set of it answers False")
    subject.expect([key], rule="SET-3")
    if not subject.has(key):
        raise Violation("SET-3", f"page 0 key {short(key)} was damaged ({damage}) and repaired, and exists does not see it")
