"""Clients that chat: rounds of turns, memory that runs short between them, and a recomputation of
every turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import torch

from tiny_hybrid_lm_parts.model import VOCABULARY
from tiny_hybrid_lm_parts.requests import Request, Restored, Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiny_hybrid_lm_parts.model import Model
    from tiny_hybrid_lm_parts.server import Server

TOLERANCE = 0.03
"""Of the largest logit: how far logits in bfloat16 may be from those that were recomputed."""
DRAIN_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Talk:
    """Lengths of the turns of a conversation, in tokens, drawn from ranges."""

    clients: int = 10
    rounds: int = 4
    request: tuple[int, int] = (24, 48)
    output: tuple[int, int] = (8, 24)
    running: int = 4
    """Requests that are computed together."""
    seed: int = 1

    def longest(self, rounds: int, page: int) -> int:
        """A session after so many rounds, in whole pages."""
        return -(-rounds * (self.request[1] + self.output[1]) // page) * page


@dataclass(frozen=True, slots=True)
class Turn:
    """Result of a turn."""

    round: int
    client: int
    restored: Restored
    restorable: int
    """Tokens of earlier turns that end at a checkpoint."""
    equal: bool
    """Whether its logits are those of a full recomputation."""
    difference: float
    """The largest between two logits."""


@dataclass
class Conversation:
    """A conversation so far, and the results of its turns."""

    sessions: list[list[int]]
    rounds: int = 0
    turns: list[Turn] = field(default_factory=list[Turn])

    def of_tier(self, tier: Tier) -> list[Turn]:
        """The turns whose prefix came from there."""
        return [turn for turn in self.turns if turn.restored.tier is tier]


def play_round(talk: Talk, conversation: Conversation, server: Server, model: Model) -> None:
    """Let every client say something, in some order, and check what each was answered."""
    conversation.rounds += 1
    random = Random(f"{talk.seed}/{conversation.rounds}")
    order = random.sample(range(talk.clients), talk.clients)
    requests = {
        client: Request(
            f"{conversation.rounds}/{client}",
            [
                *conversation.sessions[client],
                *random.choices(range(VOCABULARY), k=random.randint(*talk.request)),
            ],
            random.randint(*talk.output),
        )
        for client in order
    }
    server.serve(requests.values())
    settle(server)
    for client, request in requests.items():
        before = len(conversation.sessions[client])
        restorable = server.stack.cache.committed_length(before)
        equal, difference = compared(model, request)
        conversation.turns.append(
            Turn(conversation.rounds, client, request.restored, restorable, equal, difference)
        )
        conversation.sessions[client] = request.tokens


def settle(server: Server) -> None:
    """Wait until what was cached is on the host and in the storage."""
    if not server.stack.drain(DRAIN_SECONDS):
        raise TimeoutError(f"backups were not over within {DRAIN_SECONDS} s")


def squeeze(server: Server) -> None:
    """Make memory short: the device loses two thirds of what it holds, the host a third; what was
    used least recently."""
    usage = server.stack.cache.usage()
    server.stack.cache.evict(tokens=usage.device_tokens * 2 // 3)
    server.stack.cache.evict_host(tokens=usage.host_tokens // 3)


def empty(server: Server) -> None:
    """Leave only what is in the storage."""
    server.stack.cache.reset()


def compared(model: Model, request: Request) -> tuple[bool, float]:
    """The logits of a turn beside those of all its tokens from the first on; whether they are
    equal, and how far apart."""
    start, computed = request.restored.tokens, request.tokens[: request.computed]
    found, expected = torch.cat(request.logits), model.recompute(computed)[start:]
    difference = float((found.float() - expected.float()).abs().max())
    if model.exact:
        return torch.equal(found, expected), difference
    return difference <= TOLERANCE * float(expected.float().abs().max()), difference


def totals(turns: Sequence[Turn]) -> tuple[int, int, int]:
    """Return the number of turns, of restored tokens, and of turns with equal logits."""
    return (
        len(turns),
        sum(turn.restored.tokens for turn in turns),
        sum(turn.equal for turn in turns),
    )
