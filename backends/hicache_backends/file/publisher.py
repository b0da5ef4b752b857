"""Changes of the store: bundles that appear, disappear or are replaced, each by one rename or unlink."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from hicache_backends.file.events import Added, Removed, Unlisted
from hicache_backends.file.paths import BundleName, Claim, bundles_among, sync_directory
from hicache_backends.posix.faults import detached
from hicache_backends.posix.process_id import current_process, has_exited
from hicache_backends.posix.statx import list_directory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.file.bundle import Bundle, BundleIndex
    from hicache_backends.file.bundle_set import BundleSet
    from hicache_backends.file.change_feed import ChangeFeed
    from hicache_backends.file.page_index import PageIndex
    from hicache_backends.file.paths import StorePaths, TemporaryName
    from hicache_backends.file.temp_files import ServerClock, TempFiles
    from hicache_backends.file.writer import PendingBundle
    from hicache_storage.objects import Call, Namespace

logger = logging.getLogger(__name__)

_REFUSED = frozenset({errno.EPERM, errno.EACCES, errno.EROFS, errno.EBUSY})
"""What an unlink says that was never tried; after any other error, such as EIO of a soft mount, it may have taken effect."""


class Publisher:
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
        paths: StorePaths,
        feed: ChangeFeed,
        pending_bundles: TempFiles,
        clock: ServerClock,
        *,
        asks_server: bool,
        syncs: bool,
        abandoned_seconds: float,
    ) -> None:
        self._clock = clock
        self._paths, self._feed, self._temp_files, self._syncs = paths, feed, pending_bundles, syncs
        self._asks_server, self._abandoned_seconds = asks_server, abandoned_seconds
        self._process = current_process()
        self._described: set[str] = set()

    def publish(self, pending_bundles: Sequence[PendingBundle], call: Call) -> list[tuple[PendingBundle, Bundle]]:
        """Make written bundles visible, but for those whose caller has been answered already; then tell of them.

        A fault is noted in the draft.

        Raises:
            OSError: the announcement failed. The bundles stay in place, since another storage may have found them by
                listing and promised their pages; the next announcement covers them.
        """
        published = [(pending, bundle) for pending in pending_bundles if (bundle := self._publish(pending, call)) is not None]
        if self._syncs:
            for namespace in {pending.page_index.namespace.name for pending, _ in published}:
                sync_directory(self._paths.bundles(namespace))
        self._feed.announce()
        return published

    def remove(self, bundle_set: BundleSet, bundle: Bundle) -> bool:
        """Remove a bundle; others are told with the next announcement.

        Returns:
            Whether it was there. If not, somebody else has removed it, or puts another with some of its pages in its place;
            the shelf's next listing tells.

        Raises:
            OSError: it is still there.
        """
        name = bundle.name
        path = self._paths.bundle(bundle.namespace, name)
        try:
            if name.claim is None:
                # Without a lock: where it hangs, nobody else needs to. One who claims it meanwhile has renamed it.
                os.unlink(path)
            else:
                with bundle_set.lock, self._feed.lock:
                    self._check_unclaimed(bundle)
                    os.unlink(path)
        except FileNotFoundError:
            bundle_set.invalidate()
            return False
        except OSError as error:
            if error.errno not in _REFUSED:
                # The file may be gone all the same, and then nobody must promise its pages.
                self._skip_sequence(bundle_set)
            raise
        with bundle_set.lock:
            bundle.gone = True
            bundle_set.remove([bundle])
            self._feed.queue(bundle.namespace, [Removed(name.id)])
        return True

    def is_unclaimed(self, bundle: Bundle) -> bool:
        """Whether a bundle can be removed, as far as can be told: nobody has claimed it, or nobody who lives."""
        try:
            self._check_unclaimed(bundle)
        except OSError:
            return False
        return True

    def replace(
        self, page_index: PageIndex, old: Bundle, name: TemporaryName, index: BundleIndex, *, size: int, checksum: int
    ) -> Bundle:
        """Put a written file in the place of a bundle; others are told with the next announcement.

        Args:
            size: the file's length.
            checksum: its `tail_checksum`.

        Raises:
            FileNotFoundError: someone else has removed the bundle or replaces it; what they do holds.
            OSError: the replacement failed, and all pages are where they were; or it is done, and may not survive a
                loss of power.
        """
        bundle_set, namespace = page_index.bundle_set, old.namespace
        fault: OSError | None = None
        with bundle_set.lock, self._feed.lock:
            sequence = self._feed.next_sequence(namespace)
            new = bundle_set.bundle(BundleName(self._feed.writer, sequence, size, old.name.created_us, checksum))
            claimed = self._claim(bundle_set, old, new)
            try:
                os.rename(self._paths.temporary(name), new.path)
            except OSError:
                self._undo_claim(bundle_set, claimed, old, new)
                raise
            # From here on every listing takes the claimed bundle for void, and may remove it: there is no way back.
            try:
                if self._syncs:
                    sync_directory(self._paths.bundles(namespace))
                os.unlink(claimed)
            except FileNotFoundError:
                pass  # A listing found both, and removed the void one.
            except OSError as error:
                fault = detached(error)
            self._feed.queue(namespace, [Added(new.name, index), Removed(old.name.id)])
            new.touched, new.modified = old.touched, old.modified
            page_index.publish([(new, index)])
            bundle_set.remove([old])
        if fault is not None:
            raise fault
        return new

    def announce(self, *, always_advance: bool = False) -> None:
        """Tell everyone of what has changed; of all that is known here, if this `insist`s.

        Raises:
            OSError: they could not be told now; they will be with the next announcement.
        """
        self._feed.announce(always_advance=always_advance)

    def _claim(self, bundle_set: BundleSet, old: Bundle, new: Bundle) -> str:
        """Win a bundle; the path that it has from now on.

        Raises:
            FileNotFoundError: someone else has won it.
            OSError: the claim failed.
        """
        name = msgspec.structs.replace(old.name, claim=Claim(self._process, new.name.id))
        path = self._paths.bundle(old.namespace, name)
        try:
            self._check_unclaimed(old)
        except FileNotFoundError:
            bundle_set.invalidate()
            raise
        try:
            os.rename(old.path, path)
        except OSError:
            # The rename may have taken effect all the same. The number in the claim is used up: a later bundle of that
            # number would make the claimed one void.
            self._undo_claim(bundle_set, path, old, new)
            raise
        return path

    def _undo_claim(self, bundle_set: BundleSet, claimed: str, old: Bundle, new: Bundle) -> None:
        """Give up a replacement whose last rename failed, whether that rename took effect or not.

        The new bundle goes only after the old one is back under its own name. Where that fails, a listing may have taken
        the claimed one for void already, and the new one holds the only copy of its pages.
        """
        with contextlib.suppress(OSError):
            os.rename(claimed, old.path)
            os.unlink(new.path)
        self._skip_sequence(bundle_set)

    def _skip_sequence(self, bundle_set: BundleSet) -> None:
        """Use up the next number, where it is unknown whether a bundle of that number is there; everyone lists."""
        self._feed.queue(bundle_set.namespace, [Unlisted()])
        bundle_set.invalidate()

    def _check_unclaimed(self, bundle: Bundle) -> None:
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
            directory = self._paths.bundles(bundle.namespace)
            if all(
                name.id != claim.replacement for name in bundles_among(list_directory(directory, asks_server=self._asks_server))
            ):
                return
        raise FileNotFoundError(f"{bundle.path} is being replaced")

    def _is_abandoned(self, bundle: Bundle, claim: Claim) -> bool:
        if claim.replacement.writer == self._feed.writer:
            # This storage's own, which failed: it claims and replaces under a lock that is held now.
            return True
        dead = has_exited(claim.process)
        if dead is not None:
            return dead
        return self._clock.age_seconds(os.stat(bundle.path).st_ctime_ns) > self._abandoned_seconds

    def _publish(self, pending: PendingBundle, call: Call) -> Bundle | None:
        bundle_set, index = pending.page_index.bundle_set, pending.index
        if index is None:
            return None
        with bundle_set.lock, self._feed.lock:
            if call.expired():
                self._temp_files.discard(pending.name)
                return None
            sequence = self._feed.next_sequence(bundle_set.namespace)
            name = BundleName(self._feed.writer, sequence, pending.size, pending.created_us, pending.checksum)
            bundle = bundle_set.bundle(name)
            try:
                self._move(pending, bundle.path)
            except OSError as error:
                pending.fault = detached(error)
                self._resolve_failed_publish(bundle_set, pending, name)
                return None
            bundle_set.prepare_add(bundle)
            self._feed.queue(
                bundle_set.namespace, [Added(name, index)], partial(_commit_published, pending.page_index, bundle, index)
            )
        return bundle

    def _resolve_failed_publish(self, bundle_set: BundleSet, pending: PendingBundle, name: BundleName) -> None:
        """Use up the number of a bundle whose rename failed.

        A rename can take effect and report an error: ENOENT is what a retransmitted request gets over NFS after a lost
        reply, EIO or ETIMEDOUT what a soft mount reports of a request whose fate it does not know. Removing the
        temporary file tells: if it is still there, the bundle is not in place and never will be. Otherwise the
        bundle may be in place. It is whole then, and stays, because another storage may rely on it already.
        """
        try:
            os.unlink(self._paths.temporary(pending.name))
        except OSError:
            self._skip_sequence(bundle_set)
        else:
            self._feed.queue(bundle_set.namespace, [Removed(name.id)])

    def _move(self, pending: PendingBundle, path: str) -> None:
        namespace = pending.page_index.namespace
        if namespace.name not in self._described:
            self._create(namespace)
        try:
            os.rename(self._paths.temporary(pending.name), path)
        except FileNotFoundError:
            # The store was deleted, or the file was taken for a leftover; the second time tells which.
            self._create(namespace)
            os.rename(self._paths.temporary(pending.name), path)

    def _create(self, namespace: Namespace) -> None:
        self._paths.create_namespace(namespace.name)
        self._described.add(namespace.name)
        if self._syncs:
            sync_directory(self._paths.root)
            sync_directory(os.path.dirname(self._paths.bundles(namespace.name)))
        try:
            self._paths.describe_namespace(namespace, self._temp_files.name(0))
        except OSError as error:
            logger.debug("cannot describe namespace %s: %s", namespace.name, error)


def _commit_published(page_index: PageIndex, bundle: Bundle, index: BundleIndex) -> None:
    """Let this process find a bundle, unless it was taken back or removed."""
    with page_index.bundle_set.lock:
        if page_index.bundle_set.commit_add(bundle):
            page_index.publish([(bundle, index)])
