"""Publication, removal and replacement of bundles, each by one rename or unlink."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from hicache_backends.file.bundle import BundleName, Claim, bundles_among
from hicache_backends.file.bundle_set import no_deadline
from hicache_backends.file.events import Added, Removed
from hicache_backends.file.paths import has_exited
from hicache_backends.file.temp_files import ABANDONED_SECONDS
from hicache_backends.posix.directories import sync_directory
from hicache_backends.posix.faults import detached
from hicache_storage.spec import StorageRefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.file.bundle import Bundle, BundleId, BundleIndex
    from hicache_backends.file.bundle_set import BundleSet, Expired
    from hicache_backends.file.change_feed import ChangeFeed
    from hicache_backends.file.page_index import PageIndex
    from hicache_backends.file.temp_files import TempFiles, TemporaryName
    from hicache_backends.file.writer import PendingBundle
    from hicache_storage.objects import Call
    from hicache_storage.spec import RemovalReason

logger = logging.getLogger(__name__)


class Publisher:
    """Publishes, removes and replaces bundles, and queues the events. Thread-safe.

    Locks are taken in the order removal, bundle set, feed; none but the first is held when an
    announcement begins.

    When several processes remove or replace one bundle at once, the file system picks the winner:
    the process whose unlink succeeds, or whose rename adds a `Claim` to the bundle's name. The
    claim names the replacement. Until the replacement is in place the claimed bundle holds its
    pages; from then on it is void. So the work of a loser is never visible, and a process that is
    killed at any step loses no page.

    A claim of a process on another machine is ignored after `ABANDONED_SECONDS`. Until then the
    bundle is read as before, and neither removed nor evicted; others are evicted instead.
    """

    def __init__(self, feed: ChangeFeed, temp_files: TempFiles) -> None:
        self.feed = feed
        self.temp_files = temp_files
        self._paths = feed.paths
        self._described: set[str] = set()
        self._void: dict[BundleId, Bundle] = {}
        """Claimed bundles of this storage that are still to be unlinked, by their replacements."""
        self.moves = True
        """False once it was found that files cannot be moved to a namespace's bundles."""

    def prepare(self, page_index: PageIndex) -> None:
        """Make a namespace's directories, before anything is written or evicted for its pages.

        Raises:
            StorageRefusedError: files cannot be moved there. Any other fault is left to `publish`.
        """
        if page_index.namespace.name in self._described:
            return
        self.moves = True
        try:
            self._create(page_index)
        except OSError as error:
            if error.errno == errno.EXDEV:
                self.moves = False
                raise StorageRefusedError(
                    f"no file can be renamed from {self._paths.temporaries} to "
                    f"{page_index.bundle_set.directory}: the two must be on one file system, of one "
                    f"project quota and one encryption key, and on mergerfs with ignorepponrename"
                ) from error

    def publish(
        self, pending_bundles: Sequence[PendingBundle], call: Call
    ) -> list[tuple[PendingBundle, Bundle]]:
        """Rename written bundles into place and announce them.

        A bundle whose caller has already been answered is discarded. A fault is noted in the
        pending bundle.

        Raises:
            OSError: the announcement failed. The bundles stay in place, since another storage may
                have found them by listing and reported their pages; the next announcement covers
                them.
        """
        # All renames come before the announcement: it takes two requests, however many bundles
        # there are.
        published = [
            (pending, bundle)
            for pending in pending_bundles
            if (bundle := self._publish(pending, call)) is not None
        ]
        if self.feed.syncs:
            for directory in {bundle.directory for _, bundle in published}:
                sync_directory(directory)
        self.feed.announce()
        return published

    def remove(
        self,
        bundle_set: BundleSet,
        bundles: Sequence[Bundle],
        reason: RemovalReason,
        expired: Expired = no_deadline,
    ) -> list[bool | OSError]:
        """Remove bundles of one namespace, as `BundleSet.remove_files` does.

        One that a living process has claimed counts as replaced.

        Raises:
            OSError: as `BundleSet.remove_files`; or the bundle that one of these has replaced is
                still there.
        """
        if not bundles:
            return []
        for bundle in bundles:
            self._remove_void(bundle_set, bundle.id)
        # Taken before the check, and unlinked by these names: a bundle that is claimed from now on
        # is not found, even if another thread has learned its new name.
        paths = {bundle: bundle.path for bundle in bundles}
        free = list(filter(self.is_unclaimed, bundles))
        if len(free) < len(bundles):
            bundle_set.invalidate()
        with self.temp_files.at_work():
            removed = bundle_set.remove_files(free, expired, paths=paths, reason=reason)
        outcomes = dict(zip(free, removed, strict=True))
        return [outcomes.get(bundle, False) for bundle in bundles]

    def is_unclaimed(self, bundle: Bundle) -> bool:
        """Return whether no living process is replacing a bundle, and no dead one has replaced it.

        `False` where that cannot be determined.
        """
        claim = bundle.name.claim
        if claim is None:
            return True
        with contextlib.suppress(OSError):
            if self._is_abandoned(bundle, claim):
                # The claimant is gone, so its state is final: it either put the replacement in
                # place or not.
                names = bundles_among(self._paths.list_names(bundle.directory))
                return all(name.id != claim.replacement for name in names)
        return False

    def replace(
        self,
        page_index: PageIndex,
        old: Bundle,
        name: TemporaryName,
        index: BundleIndex,
        checksum: int,
        reason: RemovalReason,
    ) -> None:
        """Put a written file in the place of a bundle, and announce it.

        Args:
            checksum: the file's `tail_checksum`.
            reason: why pages are left out.

        Raises:
            FileNotFoundError: another process has removed or claimed the bundle; its change stands.
            OSError: the replacement failed, and all pages are where they were; or it is done, and
                may not survive a loss of power.
        """
        bundle_set, temporary = page_index.bundle_set, self.temp_files.path(name)
        fault: OSError | None = None
        with bundle_set.removing:
            self._remove_void(bundle_set, old.id)
            with bundle_set.lock, self.feed.lock:
                if not self.is_unclaimed(old):
                    bundle_set.invalidate()
                    raise FileNotFoundError(f"{old.path} is being replaced")
                sequence = self.feed.take_sequence(old.namespace, bundle_set.invalidate)
                new = bundle_set.bundle(
                    BundleName(
                        self.feed.writer, sequence, name.size, old.name.created_us, checksum
                    ),
                    index,
                )
                claim = Claim(self.temp_files.process, new.id)
                claimed = msgspec.structs.replace(old.name, claim=claim)
                path = f"{old.directory}/{claimed}"
                # Claim, replace, announce, unlink. A process killed after the claim leaves the old
                # bundle valid; one killed after the second rename leaves a void bundle that any
                # listing removes.
                try:
                    os.rename(old.path, path)
                    os.rename(temporary, new.path)
                except OSError:
                    # Each may have taken effect all the same. If the temporary file is still there,
                    # the replacement is not in place and never will be. Otherwise it may be, and
                    # holds the only copy of its pages once a listing has removed the claimed bundle
                    # as void.
                    with contextlib.suppress(OSError):
                        os.unlink(temporary)
                        os.rename(path, old.path)
                    bundle_set.invalidate()
                    raise
                # From here on every listing takes the claimed bundle for void, and may remove it:
                # the replacement can no longer be undone.
                self._void[new.id] = bundle_set.bundle(claimed)
                new.touched = old.touched
                new.modified = old.modified
                old.reason = reason
                bundle_set.add([new])
                self.feed.describe(old.namespace, Added(new.name, index))
                # In one announcement, and in every further one until the claimed file is gone:
                # without its replacement, which another process may remove, it would hold its pages
                # again.
                self.feed.removing[old.namespace] = [old.id]
            try:
                if self.feed.syncs:
                    sync_directory(new.directory)
            except OSError as error:
                fault = detached(error)
            self._remove_void(bundle_set, new.id)
        if fault is not None:
            raise fault

    def _remove_void(self, bundle_set: BundleSet, replacement: BundleId) -> None:
        """Remove the claimed bundle that another one has replaced, if it is still to be removed.

        Before the replacement is removed or replaced in its turn: without that, a claimed bundle
        seems to hold its pages again.

        Raises:
            OSError: it may still be there.
        """
        void = self._void.get(replacement)
        if void is None:
            return
        # Several threads may do it: the others find no file.
        [outcome] = bundle_set.remove_files([void])
        if isinstance(outcome, OSError):
            raise outcome
        self._void.pop(replacement, None)

    def _is_abandoned(self, bundle: Bundle, claim: Claim) -> bool:
        if claim.replacement.writer == self.feed.writer:
            # This storage's own claim, whose replacement failed: it claims and replaces under a
            # lock that is held now.
            return True
        dead = has_exited(claim.process)
        if dead is not None:
            return dead
        age = self.temp_files.clock.age_seconds(os.stat(bundle.path).st_ctime_ns)
        return age > ABANDONED_SECONDS

    def _publish(self, pending: PendingBundle, call: Call) -> Bundle | None:
        bundle_set, index = pending.page_index.bundle_set, pending.index
        if index is None:
            return None
        with bundle_set.lock, self.feed.lock:
            if call.expired():
                self.temp_files.discard(pending.name)
                return None
            namespace, temporary = bundle_set.namespace, pending.name
            sequence = self.feed.take_sequence(namespace, bundle_set.invalidate)
            name = BundleName(
                self.feed.writer, sequence, temporary.size, pending.created_us, pending.checksum
            )
            bundle = bundle_set.bundle(name, index)
            try:
                self._move(pending, bundle.path)
            except OSError as error:
                # A rename can take effect and report an error: ENOENT is what a retransmitted
                # request gets over NFS after a lost reply, EIO or ETIMEDOUT what a soft mount
                # reports of a request whose fate it does not know. If the temporary file is still
                # there, the bundle is not in place and never will be. Otherwise it may be. It is
                # complete then, and stays, because another storage may already have reported its
                # pages.
                pending.fault = detached(error)
                try:
                    os.unlink(self.temp_files.path(temporary))
                except OSError:
                    bundle_set.invalidate()
                else:
                    self.feed.describe(namespace, Removed(name.id))
                return None
            # Not visible in this process yet: other storages do not look for it before the
            # announcement, and would deny a page that this one has reported.
            bundle_set.prepare_add(bundle)
            self.feed.describe(
                namespace, Added(name, index), partial(bundle_set.commit_add, bundle)
            )
        return bundle

    def _move(self, pending: PendingBundle, path: str) -> None:
        try:
            os.rename(self.temp_files.path(pending.name), path)
        except FileNotFoundError:
            # Either the store was deleted, or the temporary file was collected as abandoned; the
            # second rename fails only in the latter case.
            self._create(pending.page_index)
            os.rename(self.temp_files.path(pending.name), path)

    def _create(self, page_index: PageIndex) -> None:
        """Make a namespace's directories, and a description for people; all write the same."""
        namespace, directory = page_index.namespace, page_index.bundle_set.directory
        above = os.path.dirname(directory)
        # Not where the store was deleted, and perhaps its mount with it.
        self._paths.create()
        os.makedirs(directory, exist_ok=True)
        # Directories of one mount may refuse renames between them.
        trial = f"{directory}/{self.temp_files.name(0)}"
        self.temp_files.write(trial, b"")
        os.unlink(trial)
        self._described.add(namespace.name)
        if self.feed.syncs:
            sync_directory(self._paths.root)
            sync_directory(above)
        description = self._paths.description(namespace.name)
        if os.path.exists(description):
            return
        text = msgspec.json.format(msgspec.json.encode(namespace.describe()), indent=2)
        try:
            self.temp_files.write(description, text + b"\n")
        except OSError as error:
            logger.debug("cannot describe namespace %s: %s", namespace.name, error)
