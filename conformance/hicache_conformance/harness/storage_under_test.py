"""A checked client of the storage under test.

Verifies the form of every answer and the neighbours of every destination.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hicache_conformance.harness.pools import (
    Page,
    PagePatterns,
    PoolMemory,
    canary,
    differing_fields,
    short,
    slots_of,
    spent,
)
from hicache_conformance.model.case import Violation, check, checked
from hicache_storage.spec import (
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolStats,
    PoolTransfer,
    PoolTransferResult,
    StorageIdentity,
    StorageUnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping, Sequence
    from random import Random

    import torch


AnswerT = TypeVar("AnswerT")
ErrorT = TypeVar("ErrorT", bound=Exception)


@dataclass(frozen=True, slots=True)
class PageGroup:
    """One transfer of a call: pages of a pool, all of one generation."""

    keys: Sequence[str]
    pool: str = PoolName.KV
    generation: int = 0


class StorageUnderTest:
    """A storage with its registered pools.

    Not for several threads at once: give each a `client`.
    """

    def __init__(
        self,
        storage: HiCacheStorage,
        memories: Mapping[str, PoolMemory],
        patterns: PagePatterns,
        random: Random,
        *,
        client: int = 0,
        clients: int = 1,
    ) -> None:
        self.storage = storage
        self.memories = memories
        self._patterns = patterns
        self._client = client
        self._clients = clients
        self._calls = client
        self.model: StorageIdentity | None = None
        """Identity in the pages' bytes, where several identities hold parts of the same page."""
        self.info: HiCacheStorageExtraInfo | None = None
        """What every call is told besides its pages; a short deadline, for instance."""
        self.arrange: Callable[[list[int]], object] = random.shuffle
        """Puts the host pages of a pool in an order, from which calls take theirs."""
        self.view: Callable[[torch.Tensor], torch.Tensor] = lambda slots: slots
        """Makes the indices of a transfer of its slots; a part of another tensor, for instance."""
        self.bound: Callable[[str, Callable[[], Any]], Any] | None = None
        """Makes each call, by its name, in a way that comes back from one that hangs."""

    @property
    def identity(self) -> StorageIdentity:
        """Identity of the pages that it reads and writes."""
        return self.storage.identity

    def register_pools(self) -> None:
        """Register its pools, as an engine does before it opens a storage."""
        for name, memory in self.memories.items():
            self.call(
                "register_mem_host_pool_v2",
                partial(self.storage.register_mem_host_pool_v2, memory.host_pool, name),
            )
        self.call("on_host_pools_registered", self.storage.on_host_pools_registered)

    def client(self, number: int, of: int, random: Random) -> StorageUnderTest:
        """The same storage, restricted to a share of each pool's pages, for one thread."""
        client = StorageUnderTest(
            self.storage, self.memories, self._patterns, random, client=number, clients=of
        )
        client.model = self.model
        return client

    def set(
        self, keys: Sequence[str], pool: str = PoolName.KV, *, generation: int = 0
    ) -> list[bool]:
        """Store self-describing pages; the answer, one for each key."""
        return self.set_many([PageGroup(keys, pool, generation)])[pool]

    def set_many(self, groups: Sequence[PageGroup]) -> dict[str, list[bool]]:
        """Store pages of several transfers in one call.

        Their sources are overwritten as soon as it returns (SET-7).
        """
        placed = self._place(groups)
        for group, pages in zip(groups, placed, strict=True):
            self.fill(group, pages)
        transfers = self.transfers(groups, placed)
        answer = self.call("batch_set_v2", lambda: self.storage.batch_set_v2(transfers, self.info))
        for group, pages in zip(groups, placed, strict=True):
            memory = self.memories[group.pool]
            # The next owner's bytes: a driver that keeps a reference and writes later stores these
            # (SET-7).
            memory.fill(pages, spent(memory.page_bytes))
        return check_form(answer, groups)

    def get(self, keys: Sequence[str], pool: str = PoolName.KV) -> list[bytes | None]:
        """Read pages; for each key what was delivered, or None."""
        return self.get_many([PageGroup(keys, pool)])[pool]

    def get_many(self, groups: Sequence[PageGroup]) -> dict[str, list[bytes | None]]:
        """Read pages of several transfers in one call.

        Raises:
            Violation: GET-3 for the form of the answer, GET-2 for a touched neighbour.
        """
        # A number for each call, and in steps of the number of clients, so that the canaries of two
        # threads differ.
        self._calls += self._clients
        placed = self._place(groups)
        pools = {group.pool for group in groups}
        for pool in pools:
            memory = self.memories[pool]
            # All pages of the client, those that are not read included: a neighbour that is touched
            # shows by a missing canary.
            memory.fill(self._own_pages(memory), canary(self._calls, memory.page_bytes))
        transfers = self.transfers(groups, placed)
        answer = self.call("batch_get_v2", lambda: self.storage.batch_get_v2(transfers, self.info))
        verdicts = check_form(answer, groups)
        delivered = dict[str, list[bytes | None]]()
        for pool in pools:
            pages = [
                page
                for group, pages in zip(groups, placed, strict=True)
                if group.pool == pool
                for page in pages
            ]
            self._check_neighbours(pool, frozenset(pages))
            delivered[pool] = [
                content if ok else None
                for content, ok in zip(
                    self.memories[pool].read_all(pages), verdicts[pool], strict=True
                )
            ]
        return delivered

    def fill(self, group: PageGroup, pages: Sequence[int]) -> None:
        """Put a transfer's pages where it will read them."""
        memory = self.memories[group.pool]
        owners = self._owners(group.keys, group.pool, group.generation)
        for page, owner in zip(pages, owners, strict=True):
            memory.write(page, self._patterns.render(owner, memory.page_bytes))

    def transfers(
        self, groups: Sequence[PageGroup], placed: Sequence[Sequence[int]]
    ) -> list[PoolTransfer]:
        """The transfers of a call that moves `groups` from or to the given pages."""
        return [
            PoolTransfer(
                PoolName(group.pool),
                self.view(slots_of(pages, self.memories[group.pool].page_size)),
                keys=list(group.keys),
            )
            for group, pages in zip(groups, placed, strict=True)
        ]

    def exists(self, keys: Sequence[str], *transfers: PoolTransfer) -> PoolTransferResult:
        """Ask for a prefix, and check that the answer agrees with itself."""
        answer = self.call(
            "batch_exists_v2",
            lambda: self.storage.batch_exists_v2(keys, list(transfers) or None, self.info),
        )
        listed, hit = list(answer.restorable_prefix_pages), answer.kv_hit_pages
        if not 0 <= hit <= len(keys):
            told = f"kv_hit_pages is {hit} for {len(keys)} keys"
            raise Violation("EX-1" if keys else "EX-8", told)
        if listed != sorted({end for end in listed if 1 <= end <= len(keys)}):
            raise Violation(
                "EX-5", f"restorable_prefix_pages is not ascending within 1..{len(keys)}: {listed}"
            )
        if hit != (listed[-1] if listed else 0):
            raise Violation(
                "EX-5", f"kv_hit_pages is {hit}, but restorable_prefix_pages ends so: {listed[-3:]}"
            )
        return answer

    def present(self, keys: Sequence[str], pool: str = PoolName.KV) -> list[bool]:
        """Ask for each page whether it exists.

        Raises:
            Violation: EX-11 for the form of the answer.
        """
        answer = self.call(
            "batch_present",
            lambda: self.storage.batch_present(keys, pool=pool, extra_info=self.info),
        )
        if not _is_list_of_bools(answer, len(keys)):
            raise Violation("EX-11", f"{len(keys)} keys were answered with {answer!r:.200}")
        return list(answer)

    def has(self, key: str, pool: str = PoolName.KV) -> bool:
        """Return whether one page exists, by the pool's own verdict."""
        # A side pool's verdict is asked for with its transfer; KV has one in any answer (EX-6).
        window = () if pool == PoolName.KV else (all_pages(pool),)
        return self.exists([key], *window).extra_pool_hit_pages.get(PoolName(pool), 0) == 1

    def delete(self, keys: Sequence[str], pool: str = PoolName.KV) -> list[bool]:
        """Delete pages; the answer, one for each key.

        Raises:
            Violation: SET-1 for the form of the answer.
        """
        answer = self.call("delete", lambda: self.storage.delete(keys, pool=pool))
        if not _is_list_of_bools(answer, len(keys)):
            raise Violation("SET-1", f"a delete of {len(keys)} keys answered {answer!r:.200}")
        return list(answer)

    def clear(self) -> str:
        """Clear the storage's namespaces.

        The error of a clear that did not happen or may have happened, empty if it returned.
        """

        def clear() -> str:
            try:
                self.storage.clear()
            except StorageUnavailableError as error:
                return f"{type(error).__name__}: {error}"
            return ""

        return self.call("clear", clear)

    def store(self, keys: Sequence[str], pool: str = PoolName.KV, *, generation: int = 0) -> None:
        """Store pages that have to fit.

        Raises:
            Violation: SET-1, a page was refused.
        """
        self.store_many([PageGroup(keys, pool, generation)])

    def store_many(self, groups: Sequence[PageGroup]) -> None:
        """As `store`, in one call."""
        answer = self.set_many(groups)
        for pool in answer:
            keys = [key for group in groups if group.pool == pool for key in group.keys]
            for index, (key, ok) in enumerate(zip(keys, answer[pool], strict=True)):
                if not ok:
                    raise Violation(
                        "SET-1",
                        f"page {index} key {short(key)} of pool {pool!r} was refused by an idle, "
                        f"nearly empty store; it has {self.memories[pool].page_bytes} bytes, and "
                        f"--page-bytes gives pages another length",
                    )

    def expect(
        self,
        keys: Sequence[str],
        pool: str = PoolName.KV,
        *,
        generation: int = 0,
        writer: StorageIdentity | None = None,
        rule: str = "",
    ) -> None:
        """Read pages that were stored, and compare every byte.

        Raises:
            Violation: GET-1 for wrong bytes; `rule`, or else SET-1, for a page that is gone.
        """
        self.compare(
            keys, self.get(keys, pool), pool, generation=generation, writer=writer, rule=rule
        )

    def compare(
        self,
        keys: Sequence[str],
        found: Sequence[bytes | None],
        pool: str = PoolName.KV,
        *,
        generation: int = 0,
        writer: StorageIdentity | None = None,
        rule: str = "",
        wrong: str = "GET-1",
    ) -> None:
        """As `expect`, for pages that were read already; `wrong` is broken by wrong bytes."""
        checked(rule or "SET-1", wrong)
        owners = self._owners(keys, pool, generation, writer)
        for index, (key, content, owner) in enumerate(zip(keys, found, owners, strict=True)):
            if content is None:
                raise Violation(
                    rule or "SET-1",
                    f"page {index} key {short(key)} of pool {pool!r} was stored (True), and a get "
                    f"answers False",
                )
            words = self._patterns.explain(content, owner)
            if words:
                raise Violation(wrong, f"page {index} key {short(key)} of pool {pool!r} {words}")

    def expect_missing(
        self,
        keys: Sequence[str],
        pool: str = PoolName.KV,
        *,
        rule: str,
        why: str,
        writer: StorageIdentity | None = None,
    ) -> None:
        """Make sure that pages are neither delivered nor said to exist.

        Args:
            why: the pages must be missing.
            writer: identity under which they were set, where it is another.

        Raises:
            Violation: `rule`; the message tells whose bytes were delivered.
        """
        checked(rule)
        # Before the get, because a page that a get has found to be another's stops existing.
        claimed = [self.has(key, pool) for key in keys]
        for index, (key, content) in enumerate(zip(keys, self.get(keys, pool), strict=True)):
            page = f"page {index} key {short(key)} of pool {pool!r} {why}"
            if content is not None:
                [page_of_key] = self._owners([key], pool)
                whose = self._patterns.explain(content, page_of_key) or "holds its own bytes"
                raise Violation(rule, f"{page}, and a get delivers it: {whose}")
            if claimed[index] or self.has(key, pool):
                under = differing_fields(writer or self.identity, self.identity)
                under = f", though it was written under {under}" if under else ""
                raise Violation(rule, f"{page}, and exists says that it is there{under}")

    def expect_own(self, keys: Sequence[str], pool: str = PoolName.KV, *, rule: str) -> None:
        """Read pages that this identity and others have stored under the same keys.

        Each has to hold its own bytes.

        Raises:
            Violation: `rule`; the message tells whose bytes were delivered.
        """
        self.compare(keys, self.get(keys, pool), pool, rule=rule, wrong=rule)

    def expect_existing(self, keys: Sequence[str], *, rule: str) -> None:
        """Make sure that a chain of KV pages is said to exist.

        Raises:
            Violation: `rule`.
        """
        hit = self.exists(keys).kv_hit_pages
        checked(rule)
        if hit != len(keys):
            raise Violation(
                rule,
                f"{len(keys)} pages can be read, and kv_hit_pages is {hit}; page {hit} key "
                f"{short(keys[hit])} is missing",
            )

    def generation_of(self, key: str, content: bytes) -> int | None:
        """Return the generation of a page of this key that the bytes are; None if they are none."""
        return self._patterns.generation(content, self._owners([key], PoolName.KV)[0])

    def explain(self, key: str, content: bytes | None, pool: str = PoolName.KV) -> str:
        """Describe what is wrong with a page; empty where nothing is, or nothing was delivered."""
        if content is None:
            return ""
        return self._patterns.explain(content, self._owners([key], pool)[0])

    def compare_holed(
        self,
        keys: Sequence[str],
        found: Sequence[bytes | None],
        stored: Container[str],
        pool: str = PoolName.KV,
        *,
        unset: str = "GET-1",
    ) -> None:
        """Compare pages that were read, of which only those of `stored` were ever set.

        Raises:
            Violation: `unset` for another page that is delivered; GET-3 for one that is not where
                it belongs; GET-1 for wrong bytes.
        """
        checked(unset)
        present = list[int]()
        for index, (key, content) in enumerate(zip(keys, found, strict=True)):
            if key in stored:
                present.append(index)
            elif content is not None:
                held = self.explain(key, content, pool)
                raise Violation(
                    unset,
                    f"page {index} key {short(key)} of pool {pool!r} was never set, and a get "
                    f"delivers it: {held}",
                )
        self.compare(
            [keys[index] for index in present],
            [found[index] for index in present],
            pool,
            rule="GET-3",
        )

    def check_right(
        self,
        keys: Sequence[str],
        found: Sequence[bytes | None],
        pool: str = PoolName.KV,
        *,
        rule: str = "GET-1",
        when: str = "",
    ) -> None:
        """Check that the pages that a get has delivered hold their own bytes; it may miss any.

        Raises:
            Violation: `rule`.
        """
        for index, (key, content) in enumerate(zip(keys, found, strict=True)):
            wrong = self.explain(key, content, pool)
            check(not wrong, rule, f"page {index} key {short(key)}{when} {wrong}")

    def stats(self, pool: str = PoolName.KV) -> PoolStats:
        """A pool's counters; zeros for a pool that has none yet."""
        return (
            self.call("get_stats", self.storage.get_stats).pools.get(PoolName(pool)) or PoolStats()
        )

    def call(self, name: str, question: Callable[[], AnswerT]) -> AnswerT:
        """Call the method of this name.

        Raises:
            Violation: it raised, or tried to end the process (LC-3).
        """
        ask: Callable[[], AnswerT] = partial(self.bound, name, question) if self.bound else question
        try:
            return ask()
        except SystemExit as error:
            raise Violation("LC-3", f"{name} tried to end the process: {error!r}") from error
        except Violation:
            raise
        except Exception as error:
            raise Violation("", f"{name} raised {type(error).__name__}: {error}") from error

    def own_pages(self, keys: Sequence[str]) -> list[int]:
        """A KV page of this client for each of the keys."""
        return list(self._own_pages(self.memories[PoolName.KV]))[: len(keys)]

    def _owners(
        self,
        keys: Sequence[str],
        pool: str,
        generation: int = 0,
        writer: StorageIdentity | None = None,
    ) -> list[Page]:
        identity = writer or self.model or self.identity
        start = self.memories[pool].first_byte
        return [Page(identity, pool, key, generation, start) for key in keys]

    def _own_pages(self, memory: PoolMemory) -> range:
        group = memory.pages // self._clients
        return range(self._client * group, (self._client + 1) * group)

    def _place(self, groups: Sequence[PageGroup]) -> list[list[int]]:
        """Pages for every transfer, by default in no order that a driver could guess.

        No two are the same in a pool.
        """
        free: dict[str, Iterator[int]] = {}
        placed = list[list[int]]()
        for group in groups:
            if group.pool not in free:
                self.arrange(pages := list(self._own_pages(self.memories[group.pool])))
                free[group.pool] = iter(pages)
            taken = list(islice(free[group.pool], len(group.keys)))
            if len(taken) < len(group.keys):
                raise ValueError(
                    f"a case moves {len(group.keys)} pages of {group.pool!r} at once; the pool is "
                    f"smaller"
                )
            placed.append(taken)
        return placed

    def _check_neighbours(self, pool: str, destinations: frozenset[int]) -> None:
        checked("GET-2")
        memory = self.memories[pool]
        blank = canary(self._calls, memory.page_bytes)
        neighbours = [page for page in self._own_pages(memory) if page not in destinations]
        read = f"a get into host pages {sorted(destinations)}"
        if touched := memory.changed(neighbours, blank):
            raise Violation("GET-2", f"{read} touched page {', '.join(map(str, touched))}")
        if not memory.guards_intact():
            raise Violation("GET-2", f"{read} wrote outside the memory of pool {pool!r}")


def check_each(keys: Sequence[str], answers: Sequence[object], rule: str, otherwise: str) -> None:
    """Check that no page of a call was answered with False, nor with None for a miss.

    Raises:
        Violation: `rule`; `otherwise` says what is wrong with such a page.
    """
    for index, (key, answer) in enumerate(zip(keys, answers, strict=True)):
        there = answer is not None and answer is not False
        check(there, rule, f"page {index} key {short(key)} {otherwise}")


def check_raises(kind: type[ErrorT], rule: str, what: str, ask: Callable[[], object]) -> ErrorT:
    """Check that a call raises an error of this kind; that error.

    Raises:
        Violation: `rule`; it raised another one, or nothing.
    """
    checked(rule)
    try:
        answer = ask()
    except kind as error:
        return error
    except Exception as error:
        raise Violation(
            rule, f"{what} raised {type(error).__name__}, which is no {kind.__name__}: {error}"
        ) from error
    raise Violation(rule, f"{what} raised nothing and answered {answer!r:.100}")


def all_pages(pool: str) -> PoolTransfer:
    """A side pool that is needed whole."""
    return PoolTransfer(PoolName(pool), hit_policy=PoolHitPolicy.ALL_PAGES)


def trailing(pool: str, window: int) -> PoolTransfer:
    """A side pool of which the last `window` pages are needed.

    Its keys are placeholders, as engines send them.
    """
    return PoolTransfer(
        PoolName(pool), keys=["__placeholder__"] * window, hit_policy=PoolHitPolicy.TRAILING_PAGES
    )


def block_groups(pool: str, block: int, group: int) -> PoolTransfer:
    """A side pool of which each block keeps a group."""
    return PoolTransfer(
        PoolName(pool), hit_policy=PoolHitPolicy.BLOCK_GROUPS, block_pages=block, group_pages=group
    )


def check_form(
    answer: Mapping[PoolName, Sequence[bool]], groups: Sequence[PageGroup]
) -> dict[str, list[bool]]:
    """Check that each page of a set or a get has its answer; a copy of the answers.

    Raises:
        Violation: GET-3.
    """
    checked("GET-3")
    expected = dict[str, int]()
    for group in groups:
        expected[group.pool] = expected.get(group.pool, 0) + len(group.keys)
    if not isinstance(answer, dict) or set(answer) != set(expected):
        raise Violation(
            "GET-3", f"a call for the pools {sorted(expected)} answered {answer!r:.200}"
        )
    for pool, pages in expected.items():
        verdicts = answer[PoolName(pool)]
        if not _is_list_of_bools(verdicts, pages):
            raise Violation(
                "GET-3", f"pool {pool!r}: {pages} keys were answered with {verdicts!r:.200}"
            )
    return {pool: list(answer[PoolName(pool)]) for pool in expected}


def _is_list_of_bools(answer: object, length: int) -> bool:
    return (
        isinstance(answer, list)
        and len(cast("list[object]", answer)) == length
        and all(isinstance(ok, bool) for ok in cast("list[object]", answer))
    )
