"""Host slots that copies in flight keep from being handed out, and the fences of pages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_storage.pools import SlotAllocator
from hicache_storage.spec import InvalidTransferError, SlotError
from hicache_storage.transfer import HostSlots, host_slots
from hicache_storage.transfer.host_slots import PageFences


class Use:
    """Something that ends when it is told to."""

    def __init__(self):
        self.over = False

    def query(self):
        return self.over


# Host slots
# -----------------------------------------------------------------------------------------------------------


def test_a_busy_host_page_waits_for_its_copy():
    host, copy = HostSlots(SlotAllocator(4, 2)), Use()
    first, second = host.alloc(2), host.alloc(2)
    host.hold(first, copy)
    assert host.free(torch.cat([first, second])) == 4
    assert host.available_size() == 2
    assert host.alloc(4) is None
    with pytest.raises(SlotError, match="given back twice"):
        host.free(first)
    assert host.alloc(2).tolist() == second.tolist()
    copy.over = True
    assert host.available_size() == 2
    assert host.alloc(2).tolist() == first.tolist()


def test_a_copy_that_failed_keeps_its_pages_and_no_other_copy_s():
    """Each query reports the state; pages of finished copies are freed once."""

    class Failed:
        def query(self):
            raise RuntimeError("the stream has failed")

    host, over, failed = HostSlots(SlotAllocator(6, 2)), Use(), Failed()
    first, second = host.alloc(2), host.alloc(2)
    host.hold(first, over)
    host.hold(first, still := Use())
    host.hold(second, failed)
    over.over = True
    for _ in range(3):
        with pytest.raises(RuntimeError, match="has failed"):
            host.available_size()
    failed.query = lambda: False
    assert host.free(torch.cat([first, second])) == 4
    assert host.available_size() == 2
    still.over = True
    assert host.available_size() == 4


@pytest.mark.parametrize("slots", [[4, 5], [-2, -1]])
def test_slots_out_of_range_are_refused(slots):
    host = HostSlots(SlotAllocator(4, 2))
    for call in (host.free, lambda indices: host.hold(indices, Use())):
        with pytest.raises(SlotError, match="out of range"):
            call(torch.tensor(slots))
        with pytest.raises(InvalidTransferError, match="whole pages of 2"):
            call(torch.tensor([0]))


def test_a_slot_of_another_page_within_one_in_use_is_refused():
    """The page would wait for its copy as a whole, and the slot that was meant would be lost."""
    host, copy = HostSlots(SlotAllocator(8, 4)), Use()
    taken = host.alloc(4)
    host.hold(taken, copy)
    wrong = torch.tensor([0, 5, 2, 3])
    for call in (host.free, lambda indices: host.hold(indices, copy)):
        with pytest.raises(InvalidTransferError, match="whole pages of 4"):
            call(wrong)
    copy.over = True
    assert host.free(taken) == 4
    assert host.available_size() == 8


def test_what_the_pool_refuses_changes_nothing():
    host = HostSlots(SlotAllocator(6, 2))
    taken = host.alloc(2)
    host.hold(taken, Use())
    with pytest.raises(SlotError, match="never handed out"):
        host.free(torch.cat([taken, torch.tensor([4, 5])]))
    assert host.free(taken) == 2


@settings(deadline=None)
@given(st.data())
def test_host_slots_against_a_model(data):
    """Random takings, uses and returns: a page is never with two owners, never free under a use,
    and none is lost."""
    pages = 5
    host = HostSlots(SlotAllocator(2 * pages, 2))
    owned, uses = set(), []
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["alloc", "free", "hold", "end"])):
            case "alloc":
                taken = host.alloc(2)
                free = pages - len(
                    owned | {page for use, held in uses if not use.over for page in held}
                )
                assert (taken is not None) == (free > 0)
                if taken is not None:
                    page = int(taken[0]) // 2
                    assert page not in owned
                    assert not any(page in held for use, held in uses if not use.over)
                    owned.add(page)
            case "free" if owned:
                page = data.draw(st.sampled_from(sorted(owned)))
                host.free(torch.tensor([2 * page, 2 * page + 1]))
                owned.remove(page)
            case "hold" if owned:
                held = data.draw(st.lists(st.sampled_from(sorted(owned)), min_size=1, max_size=3))
                uses.append((Use(), held))
                host.hold(
                    torch.tensor([2 * page + offset for page in held for offset in range(2)]),
                    uses[-1][0],
                )
            case "end" if uses:
                data.draw(st.sampled_from(uses))[0].over = True
    for use, _ in uses:
        use.over = True
    assert host.available_size() == 2 * (pages - len(owned))


def test_uses_that_have_ended_are_forgotten_where_nobody_is_short():
    host, uses = HostSlots(SlotAllocator(8, 2)), []
    slots = host.alloc(4)
    for number in range(500):
        host.hold(slots, use := Use())
        use.over = number >= 50
        uses.append(use)
    assert len(host._uses) <= 120
    for use in uses:
        use.over = True
    host.free(slots)
    assert host.available_size() == 8
    assert not host._uses


# Fences
# ---------------------------------------------------------------------------------------------------------------


class Waits:
    """A stream that notes what it waits for."""

    def __init__(self):
        self.events = []

    def wait_event(self, event):
        self.events.append(event)


@settings(deadline=None)
@given(st.data(), st.integers(1, 4))
def test_fences_against_a_model(data, kept):
    """A stream waits for the last copy that uses its pages, and so for all before it. Where that
    event is not kept, for the oldest one that is: a later one, on the same stream."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_slots, "KEPT_EVENTS", kept)
        fences, last = PageFences(6), {}
    for number in range(data.draw(st.integers(1, 30))):
        pages = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
        stream = Waits()
        fences.wait(stream, torch.tensor([pages]))
        known = [last[page] for page in pages if page in last]
        assert stream.events == [max(*known, number - kept)] if known else not stream.events
        fences.note(torch.tensor([pages] * 2), number)
        last.update(dict.fromkeys(pages, number))


class Event:
    """A place in a stream that is told when it is reached."""

    def __init__(self):
        self.is_over, self.asked = False, 0

    def query(self):
        self.asked += 1
        return self.is_over


def test_of_copies_in_order_only_the_first_that_has_not_ended_is_asked():
    fences = PageFences(8)
    host = HostSlots(SlotAllocator(8, 2), [fences])
    events = [Event() for _ in range(4)]
    for event in events:
        page = host.alloc(2)[::2] // 2
        fences.note(torch.stack([page, page]), event)
    assert host.available_size() == 0
    assert not any(event.asked for event in events), "nothing waits for a copy"
    host.free(torch.arange(8))
    events[0].is_over = events[2].is_over = True
    assert host.available_size() == 2
    assert [event.asked for event in events] == [1, 1, 0, 0]
    events[1].is_over = True
    assert host.available_size() == 6
    assert [event.asked for event in events] == [1, 2, 1, 1]


@settings(deadline=None)
@given(st.data(), st.integers(1, 4))
def test_pages_of_copies_are_in_use_until_these_have_ended(data, kept):
    """Where an event is not kept, until the oldest that is has been reached."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_slots, "KEPT_EVENTS", kept)
        fences = PageFences(6)
    events, last = [], {}
    for _ in range(data.draw(st.integers(1, 20))):
        pages = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
        events.append(Event())
        fences.note(torch.tensor([pages] * 2), events[-1])
        last.update(dict.fromkeys(pages, len(events)))
    over = data.draw(st.integers(0, len(events)))
    for event in events[:over]:
        event.is_over = True
    fences.ask()
    ended = over if over > len(events) - kept else 0
    expected = [last.get(page, 0) > ended for page in range(6)]
    assert fences.in_use(torch.arange(6)).tolist() == expected
