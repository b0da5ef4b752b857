"""Host slots that copies in flight keep from being handed out, and the fences of pages."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_storage.pools import SlotAllocator
from hicache_storage.spec import SlotError
from hicache_storage.transfer import HostSlots, host_slots
from hicache_storage.transfer.host_slots import PageFences
from tests.transfer.rig import page_slots


class Use:
    """Something that ends when it is told to, as events do."""

    def __init__(self, over=False):
        self.over, self.asked = over, 0

    def query(self):
        self.asked += 1
        return self.over


# Host slots
# -----------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.data())
def test_host_slots_against_a_model(data):
    """Random takings, uses and returns: a page is never with two owners, never free under a use,
    never freed twice, and none is lost."""
    pages = 5
    host = HostSlots(SlotAllocator(2 * pages, 2))
    owned, uses = set(), []

    def used():
        return {page for use, held in uses if not use.over for page in held}

    def draw_page(among):
        return data.draw(st.sampled_from(sorted(among)))

    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["alloc", "free", "free wrongly", "hold", "end"])):
            case "alloc":
                taken, free = host.alloc(2), pages - len(owned | used())
                assert (taken is not None) == (free > 0)
                if taken is not None:
                    page = int(taken[0]) // 2
                    assert page not in owned | used()
                    owned.add(page)
            case "free" if owned:
                # Some of them wait for their uses, and others do not.
                freed = data.draw(st.sets(st.sampled_from(sorted(owned)), min_size=1))
                assert host.free(page_slots(sorted(freed), 2)) == 2 * len(freed)
                owned -= freed
            case "free wrongly" if len(owned) < pages:
                wrong = draw_page(set(range(pages)) - owned)
                with pytest.raises(SlotError, match="given back twice"):
                    host.free(page_slots([*owned & used(), wrong], 2))
            case "hold" if owned:
                held = data.draw(st.lists(st.sampled_from(sorted(owned)), min_size=1, max_size=3))
                uses.append((Use(), held))
                host.hold(page_slots(held, 2), uses[-1][0])
            case "end" if uses:
                data.draw(st.sampled_from(uses))[0].over = True
    assert host.available_size() == 2 * (pages - len(owned | used()))
    for use, _ in uses:
        use.over = True
    assert host.available_size() == 2 * (pages - len(owned))


def test_a_copy_that_failed_keeps_its_pages_and_no_other_copy_s():
    """Each query reports the state; pages of finished copies are freed once."""

    class Failed:
        def query(self):
            raise RuntimeError("the stream has failed")

    host, failed, still = HostSlots(SlotAllocator(6, 2)), Failed(), Use()
    first, second = host.alloc(2), host.alloc(2)
    for slots, use in ((first, Use(over=True)), (first, still), (second, failed)):
        host.hold(slots, use)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="has failed"):
            host.available_size()
    failed.query = lambda: False
    assert host.free(torch.cat([first, second])) == 4
    assert host.available_size() == 2
    still.over = True
    assert host.available_size() == 4


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([8, 9, 10, 11], "out of range"),
        ([-4, -3, -2, -1], "out of range"),
        ([0], "whole pages of 4"),
        # The page would wait for its copy as a whole, and the slot that was meant would be lost.
        ([0, 5, 2, 3], "whole pages of 4"),
    ],
)
def test_wrong_slots_are_refused_and_change_nothing(slots, message):
    host, copy = HostSlots(SlotAllocator(8, 4)), Use()
    taken = host.alloc(4)
    host.hold(taken, copy)
    for call in (host.free, lambda indices: host.hold(indices, copy)):
        with pytest.raises(SlotError, match=message):
            call(torch.tensor(slots))
    copy.over = True
    assert host.free(taken) == 4
    assert host.available_size() == 8


def test_uses_that_have_ended_are_forgotten_where_nobody_is_short():
    host = HostSlots(SlotAllocator(8, 2))
    slots, kept = host.alloc(4), [Use() for _ in range(50)]
    for use in kept:
        host.hold(slots, use)
    alive = weakref.WeakSet()
    for _ in range(450):
        alive.add(use := Use(over=True))
        host.hold(slots, use)
        del use
    assert len(alive) <= 70
    for use in kept:
        use.over = True
    host.free(slots)
    assert host.available_size() == 8


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
    """A stream waits for the last copy that uses its pages, and so for all before it; these are in
    use until it has ended. Where its event is not kept, the oldest one that is stands for it: a
    later one, on the same stream."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_slots, "KEPT_EVENTS", kept)
        fences, last, events = PageFences(6), {}, []
    for number in range(data.draw(st.integers(1, 30))):
        pages = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
        stream = Waits()
        fences.wait(stream, np.array([pages]))
        known = [last[page] for page in pages if page in last]
        assert stream.events == ([events[max(*known, number - kept)]] if known else [])
        events.append(Use())
        fences.note(np.array([pages] * 2), events[-1])
        last.update(dict.fromkeys(pages, number))
    over = data.draw(st.integers(0, len(events)))
    for event in events[:over]:
        event.over = True
    fences.ask()
    ended = over if over > len(events) - kept else 0
    expected = [last.get(page, -1) >= ended for page in range(6)]
    assert fences.in_use(torch.arange(6)).tolist() == expected


def test_of_copies_in_order_only_the_first_that_has_not_ended_is_asked():
    """And none where slots are free: each question is a call of CUDA."""
    fences = PageFences(10)
    host = HostSlots(SlotAllocator(10, 2), [fences])
    events = [Use() for _ in range(4)]
    for event in events:
        page = (host.alloc(2)[::2] // 2).numpy()
        fences.note(np.array([page, page]), event)
    assert host.available_size() == 2
    assert not any(event.asked for event in events), "nothing waits for a copy"
    host.free(torch.arange(8))
    assert host.alloc(2).tolist() == [8, 9]
    assert not any(event.asked for event in events), "slots were free"
    events[0].over = events[2].over = True
    assert host.available_size() == 2
    assert [event.asked for event in events] == [1, 1, 0, 0]
    events[1].over = True
    assert host.available_size() == 6
    assert [event.asked for event in events] == [1, 2, 1, 1]
