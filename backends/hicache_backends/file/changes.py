"""Changes of the store: bundles that appear, disappear or are replaced, each by one rename or unlink."""

from __future__ import annotations

import contextlib
import logging
import os
from functools import partial
from typing import TYPE_CHECKING

from hicache_backends.file.attributes import list_directory
from hicache_backends.file.names import Added, BundleName, Claim, Removed, bundles_among
from hicache_backends.file.owner import is_dead, this_process
from hicache_backends.file.tree import sync_directory
from hicache_backends.posix.faults import kept

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.file.board import Board
    from hicache_backends.file.bundle import Index
    from hicache_backends.file.catalog import Catalog
    from hicache_backends.file.clock import Clock
    from hicache_backends.file.drafts import Drafts
    from hicache_backends.file.names import TemporaryName
    from hicache_backends.file.shelf import Bundle, Shelf
    from hicache_backends.file.tree import Tree
    from hicache_backends.file.writer import Draft
    from hicache_storage.objects import Call, Namespace

logger = logging.getLogger(__name__)


class Changes:
    """Makes changes and tells of them. Safe for many threads.

    Locks are taken in the order shelf, board; none of them is held when an announcement begins.

    Of several who remove or replace a bundle, one wins: the one who manages to unlink it, or to rename it so that its name
    says who replaces it by what (`Claim`). Until the other bundle is there the claimed one holds its pages, and from then
    on it is void. So what a loser has prepared is never seen, and whoever is killed at any instant loses nothing.

    Args:
        abandoned_seconds: a bundle that a process of another machine has claimed is taken to be nobody's after so long.
            Until then it is read as ever, and neither removed nor evicted; others are evicted instead.
    """

    def __init__(
        self,
        tree: Tree,
        board: Board,
        drafts: Drafts,
        clock: Clock,
        *,
        asks_server: bool,
        syncs: bool,
        abandoned_seconds: float,
    ) -> None:
        self._clock = clock
        self._tree, self._board, self._drafts, self._syncs = tree, board, drafts, syncs
        self._asks_server, self._abandoned_seconds = asks_server, abandoned_seconds
        self._owner = this_process()
        self._described: set[str] = set()

    def publish(self, drafts: Sequence[Draft], call: Call) -> list[tuple[Draft, Bundle]]:
        """Make written bundles visible, but for those whose caller has been answered already; then tell of them.

        A fault is noted in the draft.

        Raises:
            OSError: nobody could be told; the bundles have been taken back.
        """
        published = [(draft, bundle) for draft in drafts if (bundle := self._publish(draft, call)) is not None]
        try:
            if self._syncs:
                for namespace in {draft.catalog.namespace.name for draft, _ in published}:
                    sync_directory(self._tree.bundles(namespace))
            self._board.announce()
        except OSError:
            for draft, bundle in published:
                with contextlib.suppress(OSError):
                    self.remove(draft.catalog.shelf, bundle)
            raise
        return published

    def remove(self, shelf: Shelf, bundle: Bundle) -> bool:
        """Remove a bundle; others are told with the next announcement.

        Returns:
            Whether it was there. If not, somebody else has removed it, or puts another with some of its pages in its place;
            the shelf's next listing tells.

        Raises:
            OSError: it is still there.
        """
        name = bundle.name
        path = self._tree.bundle(bundle.namespace, name)
        try:
            if name.claim is None:
                # Without a lock: where it hangs, nobody else needs to. One who claims it meanwhile has renamed it.
                os.unlink(path)
            else:
                with shelf.lock, self._board.lock:
                    self._expect_unclaimed(bundle)
                    os.unlink(path)
        except FileNotFoundError:
            shelf.distrust()
            return False
        with shelf.lock:
            bundle.gone = True
            shelf.remove([bundle])
            self._board.queue(bundle.namespace, [Removed(name.id)])
        return True

    def is_free(self, bundle: Bundle) -> bool:
        """Whether a bundle can be removed, as far as can be told: nobody has claimed it, or nobody who lives."""
        try:
            self._expect_unclaimed(bundle)
        except OSError:
            return False
        return True

    def replace(self, catalog: Catalog, old: Bundle, name: TemporaryName, index: Index, *, size: int, checksum: int) -> Bundle:
        """Put a written file in the place of a bundle; others are told with the next announcement.

        Args:
            size: the file's length.
            checksum: its `tail_checksum`.

        Raises:
            FileNotFoundError: someone else has removed the bundle or replaces it; what they do holds.
            OSError: nothing has changed.
        """
        shelf, namespace = catalog.shelf, old.namespace
        with shelf.lock, self._board.lock:
            sequence = self._board.next_sequence(namespace)
            new = shelf.bundle(BundleName(self._board.writer, sequence, size, old.name.created_us, checksum))
            claimed = self._claim(shelf, old, new)
            try:
                os.rename(self._tree.temporary(name), new.path)
                if self._syncs:
                    sync_directory(self._tree.bundles(namespace))
                with contextlib.suppress(FileNotFoundError):
                    # Whoever has listed the two has removed it.
                    os.unlink(claimed)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(new.path)
                with contextlib.suppress(OSError):
                    os.rename(claimed, old.path)
                # The number is used up: it must never stand for a bundle that voids the claimed one.
                self._board.queue(namespace, [Removed(new.name.id)])
                shelf.distrust()
                raise
            self._board.queue(namespace, [Added(new.name), Removed(old.name.id)])
            new.touched, new.modified = old.touched, old.modified
            catalog.publish([(new, index)])
            shelf.remove([old])
        return new

    def announce(self, *, insist: bool = False) -> None:
        """Tell everyone of what has changed; of all that is known here, if this `insist`s.

        Raises:
            OSError: they could not be told now; they will be with the next announcement.
        """
        self._board.announce(insist=insist)

    def _claim(self, shelf: Shelf, old: Bundle, new: Bundle) -> str:
        """Win a bundle; the path that it has from now on.

        Raises:
            FileNotFoundError: someone else has won it.
            OSError: nothing has changed.
        """
        name = old.name._replace(claim=Claim(self._owner, new.name.id))
        path = self._tree.bundle(old.namespace, name)
        try:
            self._expect_unclaimed(old)
            os.rename(old.path, path)
        except FileNotFoundError:
            shelf.distrust()
            raise
        return path

    def _expect_unclaimed(self, bundle: Bundle) -> None:
        """Make sure that nobody who lives is about to replace a bundle.

        Raises:
            FileNotFoundError: somebody is, or has been.
            OSError: it could not be told.
        """
        claim = bundle.name.claim
        if claim is None:
            return
        if self._is_abandoned(bundle, claim):
            # Nobody does anything any more: now it can be told how far they came.
            directory = self._tree.bundles(bundle.namespace)
            if all(
                name.id != claim.replacement for name in bundles_among(list_directory(directory, asks_server=self._asks_server))
            ):
                return
        raise FileNotFoundError(f"{bundle.path} is being replaced")

    def _is_abandoned(self, bundle: Bundle, claim: Claim) -> bool:
        if claim.replacement.writer == self._board.writer:
            # This storage's own, which failed: it claims and replaces under a lock that is held now.
            return True
        dead = is_dead(claim.owner)
        if dead is not None:
            return dead
        return self._clock.age_seconds(os.stat(bundle.path).st_ctime_ns) > self._abandoned_seconds

    def _publish(self, draft: Draft, call: Call) -> Bundle | None:
        shelf, index = draft.catalog.shelf, draft.index
        if index is None:
            return None
        with shelf.lock, self._board.lock:
            if call.expired():
                self._drafts.discard(draft.name)
                return None
            sequence = self._board.next_sequence(shelf.namespace)
            name = BundleName(self._board.writer, sequence, draft.size, draft.created_us, draft.checksum)
            bundle = shelf.bundle(name)
            try:
                self._move(draft, bundle.path)
            except OSError as error:
                draft.fault = kept(error)
                self._drafts.discard(draft.name)
                return None
            shelf.expect(bundle)
            self._board.queue(shelf.namespace, [Added(name)], partial(_show, draft.catalog, bundle, index))
        return bundle

    def _move(self, draft: Draft, path: str) -> None:
        namespace = draft.catalog.namespace
        if namespace.name not in self._described:
            self._create(namespace)
        try:
            os.rename(self._tree.temporary(draft.name), path)
        except FileNotFoundError:
            # The store was deleted, or the file was taken for a leftover; the second time tells which.
            self._create(namespace)
            os.rename(self._tree.temporary(draft.name), path)

    def _create(self, namespace: Namespace) -> None:
        self._tree.create_namespace(namespace.name)
        self._described.add(namespace.name)
        if self._syncs:
            sync_directory(self._tree.root)
            sync_directory(os.path.dirname(self._tree.bundles(namespace.name)))
        try:
            self._tree.describe_namespace(namespace, self._drafts.name(0))
        except OSError as error:
            logger.debug("cannot describe namespace %s: %s", namespace.name, error)


def _show(catalog: Catalog, bundle: Bundle, index: Index) -> None:
    """Let this process find a bundle, unless it was taken back or removed."""
    with catalog.shelf.lock:
        if catalog.shelf.arrive(bundle):
            catalog.publish([(bundle, index)])
