"""Settings of a run, its profiles, and the placeholders in its options and commands.

A profile is the number of random trials; placeholders are `{tmp}`, `{unique}` and `{port:NAME}`.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import msgspec

from hicache_conformance.model import RUN_VARIABLE
from hicache_conformance.model.rules import Level
from hicache_storage.spec.config import parse_bytes
from hicache_storage.tools.options import TMP, UNIQUE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


PAGE_VARIABLE: Final = "HICACHE_CONFORMANCE_PAGE_BYTES"
"""Environment variable by which the processes of a run learn what the lengths of its pages are
multiples of."""
MIN_PAGE_UNIT: Final = 512
_PORT: Final = re.compile(r"\{port:([A-Za-z0-9_.-]+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a run: of chance, and of a command line what it is about."""

    # The seed decides what cases do, the run's name only what pages are called: repeated by its
    # seed, a run must not find the pages of the first one.
    seed: int = field(default_factory=lambda: secrets.randbelow(2**32))
    run: str = field(default_factory=lambda: secrets.token_hex(4))
    """Goes into the identities' salts, so that pages left by an earlier run of the same seed are
    not found."""
    profile: str = "default"
    levels: tuple[Level, ...] = tuple(Level)
    page_bytes: int = 0
    """Bytes that every page is a multiple of; 0 for pages of any length."""
    driver: str = ""
    """As `hicache drivers` lists it; empty in an author's own pytest."""
    config: dict[str, str] = field(default_factory=dict[str, str])
    """Options of the driver, with placeholders."""
    interface: str = ""
    """Interface of a foreign driver; empty for the contract's own."""
    services: list[str] | None = None
    """Commands of the servers that the driver needs; None for those that it names itself."""
    cases: list[str] = field(default_factory=list[str])
    """Names that a case must contain one of; empty for all."""
    case_seconds: float = 300.0
    """A case that takes longer is taken for hanging."""
    home: str = ""
    """Directory of a command line's run."""

    def write(self, path: Path) -> None:
        """Write them for `of_environment`."""
        # Created before it is written, because options may hold secrets.
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode(self))

    @classmethod
    def of_environment(cls) -> Self | None:
        """The settings that a command line has given to the processes of its run; None elsewhere."""
        path = os.environ.get(RUN_VARIABLE)
        return msgspec.json.decode(Path(path).read_bytes(), type=cls) if path else None


def parse_page_bytes(text: str) -> int:
    """What the lengths of pages shall be multiples of, in bytes; 0 for pages of any length.

    Raises:
        ValueError: it is no number of bytes, or not a multiple of 512.
    """
    page_bytes = parse_bytes(text)
    # Pages are divided among slots, layers and components, and elements have up to eight bytes.
    if page_bytes % MIN_PAGE_UNIT:
        raise ValueError(
            f"{text!r}: pages are multiples of {MIN_PAGE_UNIT} bytes, or of any length"
        )
    return page_bytes


def filled(text: str, tmp: Path | str, ports: Mapping[str, int], unique: str = UNIQUE) -> str:
    """The text with its placeholders filled in; a port that is not known stays as it is."""
    # Left as it is: the preflight names the port in its message, where a wrong number would be a
    # connection refused.
    text = text.replace(TMP, str(tmp)).replace(UNIQUE, unique)
    return _PORT.sub(lambda found: str(ports.get(found[1], found[0])), text)


def port_names(texts: Iterable[object]) -> list[str]:
    """Names of the ports in texts, each once, in their order; what is no text has none."""
    return list(
        dict.fromkeys(
            name for text in texts if isinstance(text, str) for name in _PORT.findall(text)
        )
    )


def unique_name(*what: object) -> str:
    """A name for `{unique}` that depends on `what` alone: letters and digits that fit into a key."""
    return hashlib.blake2b("/".join(map(str, what)).encode(), digest_size=8).hexdigest()


def mentions_tmp(texts: Iterable[object]) -> bool:
    """Return whether `{tmp}` stands in one of the texts."""
    return any(TMP in text for text in texts if isinstance(text, str))


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Sizes of the randomised cases; by default those of the profile `default`."""

    name: str
    histories: int = 100
    """Random histories of the state machine."""
    steps: int = 30
    """Calls in each of them."""
    chains: int = 1000
    """Random chains of each existence case, beyond the exhaustive small ones."""
    policies: int = 16
    """Policies, or pairs of them, that each small presence map is asked under; of 10 and 16, drawn
    at random."""
    thread_calls: int = 200
    """Calls of each thread of the concurrent cases."""
    store_fills: int = 4
    """How often stores of limited capacity are filled again."""
    plans: int = 24
    """Random plans of faults, on each injector."""
    plan_steps: int = 20
    """Random calls under each of them."""
    process_calls: int = 200
    """Calls of each thread of the cases with several processes."""
    kills: int = 16
    """Processes killed in each case that is about that."""
    outages: int = 3
    """How often one of several stores is away, in each case about that; the next one each time."""
    shrinks: bool = True
    """Whether a failing history is made as short as possible."""
    recovery_seconds: float = 15.0
    """How long after a fault a storage may go on answering misses; a circuit breaker or a reconnect
    needs a few of them."""
    grace_seconds: float = 5.0
    """Time for what a closed storage had begun to end; a working driver needs none of it."""


PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            name="smoke",
            histories=8,
            steps=15,
            chains=50,
            policies=4,
            thread_calls=30,
            store_fills=2,
            plans=4,
            plan_steps=10,
            process_calls=60,
            kills=4,
            outages=2,
            # Shrinking repeats a failing history many times; a quick run leaves that to a run of the
            # case by its name.
            shrinks=False,
            recovery_seconds=5.0,
            grace_seconds=2.0,
        ),
        Profile(name="default"),
    )
}


def parse_profile(text: str) -> str:
    """Return the name of a profile.

    Raises:
        ValueError: there is none of this name.
    """
    if text not in PROFILES:
        raise ValueError(f"unknown profile {text!r}; profiles are {', '.join(PROFILES)}")
    return text
