"""Several processes on one identity, and the history that they make together."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from hicache_conformance.history.checker import HistoryChecker
from hicache_conformance.history.events import VALUES, Call, Event
from hicache_conformance.history.story import RULES, Story
from hicache_conformance.history.workload import Workload
from hicache_conformance.pages import Page, short
from hicache_conformance.peers.messages import PoolShape
from hicache_conformance.peers.watching import watch
from hicache_conformance.violation import Violation
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_conformance.history.findings import Kind
    from hicache_conformance.lab import Lab
    from hicache_conformance.peers.peer import Peer
    from hicache_conformance.peers.watching import Strike
    from hicache_storage.spec import StorageIdentity

START_SECONDS: Final = 0.003
"""How long before they begin processes are told to; they have heard of it by then."""


class Stage:
    """Peers of one identity, the values that their sets write, and everything they did.

    Args:
        lab: the case's.
        pools: host pools of every peer; a KV pool if not given.
        config: options of the driver in the place of the lab's.
    """

    def __init__(
        self, lab: Lab, pools: Mapping[str, PoolShape] | None = None, config: Mapping[str, object] | None = None
    ) -> None:
        self._lab, self._config = lab, config
        self.pools: Mapping[str, PoolShape] = pools or {PoolName.KV: PoolShape()}
        self.identity: StorageIdentity = lab.identity()
        self.keys = list[str]()
        self.peers: list[Peer] = []
        self._next_value, self._works = 1, 0

    def peer(self, name: str, *, fresh: bool = False, clock: float = 0.0) -> Peer:
        """Start one more process, on the same store; the arguments are those of `Lab.peer`."""
        peer = self._lab.peer(self.identity, name=name, pools=self.pools, config=self._config, fresh=fresh, clock=clock)
        self.peers.append(peer)
        return peer

    def new_keys(self, count: int) -> list[str]:
        """Fresh keys, known to the report."""
        keys = self._lab.keys(count)
        for pool in self.pools:
            for key in keys:
                self._lab.book.render(Page(self.identity, pool, key), 1)
        self.keys += keys
        return keys

    def value(self) -> int:
        """A value that no other set of this stage writes."""
        return self._take(1)

    def work(
        self, keys: Sequence[str], mix: Mapping[Call, int], *, calls: int, lanes: int = 1, longest: int = 6, at: int = 0
    ) -> Workload:
        """A random workload on these keys, in all pools, with values of its own."""
        self._works += 1
        return Workload(
            seed=f"{self._lab.number(f'workload {self._works}')}", lanes=lanes, calls=calls, keys=tuple(keys), longest=longest,
            pools=tuple(map(str, self.pools)), mix=dict(mix), first_value=self._take(lanes * calls), start_at=at,
        )  # fmt: skip

    def soon(self) -> int:
        """A time at which all processes can begin together."""
        return time.monotonic_ns() + int(START_SECONDS * 1e9)

    def play(self, works: Mapping[Peer, Workload], strikes: Mapping[Peer, Strike] | None = None) -> None:
        """Let peers work at the same time, and kill some on the way.

        Raises:
            Violation: a rule was broken, a process died by itself, or hangs.
        """
        for peer, work in works.items():
            peer.start(work)
        watch(list(works), strikes)

    @property
    def events(self) -> list[Event]:
        """The history so far, of all peers together."""
        return [event for peer in self.peers for event in peer.events]

    def judge(self, rule: str, *, keeps: bool | None = None, rules: Mapping[Kind, str] = RULES) -> None:
        """Check the history so far.

        Args:
            rule: broken by a finding that `rules` gives no other one.
            keeps: whether pages stay until they are removed; if not given, whether the driver does not evict.
            rules: by kind of finding.

        Raises:
            Violation: something that was answered cannot be.
        """
        events = self.events
        checker = HistoryChecker(events, keeps=not self._lab.capabilities.evicts if keeps is None else keeps)
        findings = checker.check()
        if findings:
            raise Story(self.identity, self._lab.book, events).violation(findings, rule, rules)

    def expect_sound(self, rule: str) -> None:
        """Make sure that no peer has met a damaged page, since nobody has damaged any.

        Raises:
            Violation: `rule`; somebody saw a page that was not whole.
        """
        for peer in self.peers:
            for pool in self.pools if not peer.ended else ():
                damaged = peer.stats(pool).pages_damaged
                if damaged:
                    raise Violation(
                        rule,
                        f"process {peer.name} counts {damaged} damaged pages in pool {pool!r}: it has seen pages that were not whole",
                    )

    def expect(self, peer: Peer, keys: Sequence[str], value: int, rule: str, pool: str = PoolName.KV) -> None:
        """Read pages of an idle store, which were all set with one value.

        Raises:
            Violation: `rule` for a page that is not delivered, GET-1 for one that holds something else.
        """
        found = peer.get(keys, pool)
        for index, (key, content) in enumerate(zip(keys, found, strict=True)):
            page = f"page {index} key {short(key)} of pool {pool!r} was stored (True)"
            if content is None:
                raise Violation(rule, f"{page}, and a get of process {peer.name} answers False")
            if content != value:
                # Says more about what is no value of this page at all.
                self.judge("GET-1")
                raise Violation("GET-1", f"{page} with value {value}, and process {peer.name} is delivered value {content!r:.80}")

    def expect_existing(self, peer: Peer, keys: Sequence[str], rule: str) -> None:
        """Make sure that a chain of KV pages is said to exist.

        Raises:
            Violation: `rule`.
        """
        hit = peer.exists(keys)
        if hit != len(keys):
            raise Violation(rule, f"{len(keys)} pages can be read, and process {peer.name} is told that {hit} exist")

    def expect_agreement(self, peer: Peer, keys: Sequence[str], rule: str) -> None:
        """Ask an idle store for pages that may be there or not: exists and get say the same.

        Raises:
            Violation: `rule`; a page is said to exist and cannot be read, or is read and said not to exist.
        """
        claimed = [peer.exists([key]) == 1 for key in keys]
        for index, (key, there, content) in enumerate(zip(keys, claimed, peer.get(keys), strict=True)):
            page = f"page {index} key {short(key)}"
            if there and content is None:
                raise Violation(rule, f"{page} is said to exist, and a get of process {peer.name} answers False")
            if content is not None and not there:
                raise Violation(rule, f"{page} is delivered to process {peer.name}, and exists does not find it")

    def store(self, peer: Peer, keys: Sequence[str], rule: str, pool: str = PoolName.KV) -> int:
        """Set pages that have to fit; the value they were set with.

        Raises:
            Violation: `rule`; a page was refused.
        """
        value = self.value()
        for index, (key, ok) in enumerate(zip(keys, peer.set(keys, value, pool), strict=True)):
            if not ok:
                where = f"page {index} key {short(key)} of pool {pool!r}"
                raise Violation(rule, f"{where} was refused to process {peer.name} by an idle, nearly empty store")
        return value

    def _take(self, count: int) -> int:
        first, self._next_value = self._next_value, self._next_value + count
        if self._next_value > VALUES:
            raise ValueError(f"a case uses more than {VALUES} values; give it another stage")
        return first
