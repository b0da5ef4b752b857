"""Listening to several peers that run workloads, and killing some of them on the way."""

from __future__ import annotations

import selectors
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hicache_conformance.history.events import Begun, Ended
from hicache_conformance.processes.worker import SILENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_conformance.processes.worker import Peer

LEAST_SPREAD_SECONDS: Final = 300e-6


@dataclass(frozen=True, slots=True)
class Strike:
    """When to kill a peer."""

    after_calls: int
    """That many calls have begun."""
    fraction: float
    """And then so much of the time has passed that two of its calls took on average, from 0 to 1. Its first call does not count,
    which opens the store: with `after_calls` of at least 3, half of the strikes fall into the call that has begun."""


def watch(peers: Sequence[Peer], strikes: Mapping[Peer, Strike] | None = None) -> None:
    """Listen until every workload has come to its end or its process has been killed.

    Raises:
        Violation: a rule was broken, a process died by itself, or hangs (FT-3).
    """
    strikes = strikes or {}
    executioners = {peer: _Executioner(peer, strike) for peer, strike in strikes.items()}
    with selectors.DefaultSelector() as selector:
        for peer in peers:
            selector.register(peer.channel, selectors.EVENT_READ, peer)
        heard_at = {peer: time.monotonic() for peer in peers}
        while selector.get_map():
            ready: list[Peer] = [key.data for key, _ in selector.select(1.0)]
            for peer in ready:
                heard_at[peer] = time.monotonic()
                _listen(peer, executioners.get(peer))
            for peer, at in heard_at.items():
                if peer.busy and time.monotonic() - at > SILENCE_SECONDS:
                    raise peer.hangs()
            for peer in [key.data for key in selector.get_map().values() if not key.data.busy]:
                selector.unregister(peer.channel)


def _listen(peer: Peer, executioner: _Executioner | None) -> None:
    try:
        messages = peer.channel.pending()
    except EOFError:
        raise peer.mourn() from None
    for message in messages:
        peer.note(message)
        if executioner and isinstance(message, Begun | Ended):
            executioner.count(message)
    if executioner:
        executioner.strike_if_due()


class _Executioner:
    """Kills one peer."""

    def __init__(self, peer: Peer, strike: Strike) -> None:
        self._peer, self._strike = peer, strike
        self._warm_at: int | None = None
        self._begun = self._ended = 0
        self._busy_ns = 0

    def count(self, message: Begun | Ended) -> None:
        """Take a message of a workload."""
        if isinstance(message, Begun):
            self._begun += 1
        else:
            self._ended += 1
            self._warm_at = self._warm_at or message.at
            self._busy_ns = message.at - self._warm_at

    def strike_if_due(self) -> None:
        """Kill if the moment has come."""
        if self._begun < self._strike.after_calls or not self._peer.busy:
            return
        spread = 2e-9 * self._busy_ns / (self._ended - 1) if self._ended > 1 else 0.0
        time.sleep(self._strike.fraction * max(spread, LEAST_SPREAD_SECONDS))
        self._peer.kill()
