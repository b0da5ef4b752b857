"""Changes of the store: bundles that appear, disappear or are replaced, each by one rename or unlink."""

from __future__ import annotations

import contextlib
import logging
import os
from functools import partial
from typing import TYPE_CHECKING

from hicache_backends.file.faults import kept
from hicache_backends.file.names import Added, BundleName, Removed
from hicache_backends.file.tree import sync_directory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.file.board import Board
    from hicache_backends.file.bundle import Index
    from hicache_backends.file.catalog import Catalog
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
    """

    def __init__(self, tree: Tree, board: Board, drafts: Drafts, *, syncs: bool) -> None:
        self._tree, self._board, self._drafts, self._syncs = tree, board, drafts, syncs
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
            Whether it was there. If not, somebody else has removed it, or has put another with some of its pages in its place.

        Raises:
            OSError: it is still there.
        """
        try:
            os.unlink(bundle.path)
            there = True
        except FileNotFoundError:
            there = False
        bundle.gone = True
        shelf.remove([bundle])
        self._board.queue(bundle.namespace, [Removed(bundle.name.id)])
        return there

    def replace(self, catalog: Catalog, old: Bundle, name: TemporaryName, index: Index) -> Bundle:
        """Put a written file in the place of a bundle; others are told with the next announcement.

        Raises:
            FileNotFoundError: someone else has removed or replaced the bundle; what they did holds.
            OSError: nothing has changed.
        """
        shelf, namespace = catalog.shelf, old.namespace
        with shelf.lock, self._board.lock:
            sequence = self._board.next_sequence(namespace)
            new = shelf.bundle(BundleName(self._board.writer, sequence, name.size, old.name.created_ms))
            os.rename(self._tree.temporary(name), new.path)
            try:
                if self._syncs:
                    sync_directory(self._tree.bundles(namespace))
                # Of several who replace a bundle, the one who manages to remove it wins.
                os.unlink(old.path)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.unlink(new.path)
                self._board.queue(namespace, [Removed(new.name.id)])
                if isinstance(error, FileNotFoundError):
                    shelf.remove([old])
                raise
            self._board.queue(namespace, [Added(new.name), Removed(old.name.id)])
            new.touched, new.modified = old.touched, old.modified
            catalog.publish([(new, index)])
            shelf.remove([old])
        return new

    def announce(self) -> None:
        """Tell everyone of what has changed.

        Raises:
            OSError: they could not be told now; they will be with the next announcement.
        """
        self._board.announce()

    def _publish(self, draft: Draft, call: Call) -> Bundle | None:
        shelf, index = draft.catalog.shelf, draft.index
        if index is None:
            return None
        with shelf.lock, self._board.lock:
            if call.expired():
                self._drafts.discard(draft.name)
                return None
            sequence = self._board.next_sequence(shelf.namespace)
            name = BundleName(self._board.writer, sequence, draft.size, draft.created_ms)
            bundle = shelf.bundle(name)
            try:
                self._move(draft, bundle.path)
            except OSError as error:
                draft.fault = kept(error)
                self._drafts.discard(draft.name)
                return None
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
    """Let this process find a bundle, unless it was taken back."""
    if not bundle.gone:
        catalog.publish([(bundle, index)])
