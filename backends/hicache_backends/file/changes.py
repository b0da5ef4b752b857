"""Changes of the store: bundles that appear, disappear or are replaced, each by one rename or unlink."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from hicache_backends.file.attributes import list_directory
from hicache_backends.file.names import Added, BundleName, Claim, Removed, Unlisted, bundles_among
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

_REFUSED = frozenset({errno.EPERM, errno.EACCES, errno.EROFS, errno.EBUSY})
"""What an unlink says that was never tried; after any other error, such as EIO of a soft mount, it may have taken effect."""


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
            OSError: the announcement failed. The bundles stay in place, since another storage may have found them by
                listing and promised their pages; the next announcement covers them.
        """
        published = [(draft, bundle) for draft in drafts if (bundle := self._publish(draft, call)) is not None]
        if self._syncs:
            for namespace in {draft.catalog.namespace.name for draft, _ in published}:
                sync_directory(self._tree.bundles(namespace))
        self._board.announce()
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
        except OSError as error:
            if error.errno not in _REFUSED:
                # The file may be gone all the same, and then nobody must promise its pages.
                self._use_up(shelf)
            raise
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
            OSError: the replacement failed, and all pages are where they were; or it is done, and may not survive a
                loss of power.
        """
        shelf, namespace = catalog.shelf, old.namespace
        fault: OSError | None = None
        with shelf.lock, self._board.lock:
            sequence = self._board.next_sequence(namespace)
            new = shelf.bundle(BundleName(self._board.writer, sequence, size, old.name.created_us, checksum))
            claimed = self._claim(shelf, old, new)
            try:
                os.rename(self._tree.temporary(name), new.path)
            except OSError:
                self._restore(shelf, claimed, old, new)
                raise
            # From here on every listing takes the claimed bundle for void, and may remove it: there is no way back.
            try:
                if self._syncs:
                    sync_directory(self._tree.bundles(namespace))
                os.unlink(claimed)
            except FileNotFoundError:
                pass  # A listing found both, and removed the void one.
            except OSError as error:
                fault = kept(error)
            self._board.queue(namespace, [Added(new.name, index), Removed(old.name.id)])
            new.touched, new.modified = old.touched, old.modified
            catalog.publish([(new, index)])
            shelf.remove([old])
        if fault is not None:
            raise fault
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
            OSError: the claim failed.
        """
        name = msgspec.structs.replace(old.name, claim=Claim(self._owner, new.name.id))
        path = self._tree.bundle(old.namespace, name)
        try:
            self._expect_unclaimed(old)
        except FileNotFoundError:
            shelf.distrust()
            raise
        try:
            os.rename(old.path, path)
        except OSError:
            # The rename may have taken effect all the same. The number in the claim is used up: a later bundle of that
            # number would make the claimed one void.
            self._restore(shelf, path, old, new)
            raise
        return path

    def _restore(self, shelf: Shelf, claimed: str, old: Bundle, new: Bundle) -> None:
        """Give up a replacement whose last rename failed, whether that rename took effect or not.

        The new bundle goes only after the old one is back under its own name. Where that fails, a listing may have taken
        the claimed one for void already, and the new one holds the only copy of its pages.
        """
        with contextlib.suppress(OSError):
            os.rename(claimed, old.path)
            os.unlink(new.path)
        self._use_up(shelf)

    def _use_up(self, shelf: Shelf) -> None:
        """Use up the next number, where it is unknown whether a bundle of that number is there; everyone lists."""
        self._board.queue(shelf.namespace, [Unlisted()])
        shelf.distrust()

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
                self._settle(shelf, draft, name)
                return None
            shelf.expect(bundle)
            self._board.queue(shelf.namespace, [Added(name, index)], partial(_show, draft.catalog, bundle, index))
        return bundle

    def _settle(self, shelf: Shelf, draft: Draft, name: BundleName) -> None:
        """Use up the number of a bundle whose rename failed.

        A rename can take effect and report an error: ENOENT is what a retransmitted request gets over NFS after a lost
        reply, EIO or ETIMEDOUT what a soft mount reports of a request whose fate it does not know. Removing the
        temporary file tells: if it is still there, the bundle is not in place and never will be. Otherwise the
        bundle may be in place. It is whole then, and stays, because another storage may rely on it already.
        """
        try:
            os.unlink(self._tree.temporary(draft.name))
        except OSError:
            self._use_up(shelf)
        else:
            self._board.queue(shelf.namespace, [Removed(name.id)])

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
