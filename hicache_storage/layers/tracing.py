"""A span for each call, in the caller's thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hicache_storage.layers.base import MeasuringLayer
from hicache_storage.objects.requests import check_transfers
from hicache_storage.observability.request_ids import RequestScope, call_request_id
from hicache_storage.spec import HiCacheStorageExtraInfo, PoolName
from hicache_storage.spec.arguments import check_list
from hicache_storage.spec.calls import check_info

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_storage.observability.otel import Spans
    from hicache_storage.spec import HiCacheStorage, PoolTransfer, PoolTransferResult

HITS = "hicache.hits"
BYTES = "hicache.bytes"


class TracingLayer(MeasuringLayer):
    """Spans `hicache.batch_exists`, `hicache.batch_get` and `hicache.batch_set`.

    They have the pools, pages, bytes and hits of a call.

    The outermost layer, so that a span covers refusals of the breaker and missed deadlines. Spans
    of the driver, such as requests to a metadata server, are its children.
    """

    def __init__(self, inner: HiCacheStorage, spans: Spans) -> None:
        super().__init__(inner)
        self._spans = spans

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        check_list(keys, "keys")
        if pool_transfers is not None:
            check_transfers(pool_transfers, "pool_transfers")
        # The id is drawn here and passed down, so that the span, the log and the metadata server
        # have the same one.
        info = _with_id(extra_info)
        pools = list(
            dict.fromkeys((PoolName.KV, *(transfer.name for transfer in pool_transfers or ())))
        )
        with (
            RequestScope(info.request_id or "") as name,
            self._spans.call("batch_exists", name, pools, len(keys)) as span,
        ):
            result = super().batch_exists_v2(keys, pool_transfers, info)
            span.set_attribute(HITS, result.kv_hit_pages)
        return result

    def batch_present(
        self,
        keys: Sequence[str],
        *,
        pool: str = PoolName.KV,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        check_list(keys, "keys")
        info = _with_id(extra_info)
        with (
            RequestScope(info.request_id or "") as name,
            self._spans.call("batch_present", name, [PoolName(pool)], len(keys)) as span,
        ):
            found = super().batch_present(keys, pool=pool, extra_info=info)
            span.set_attribute(HITS, sum(found))
        return found

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        return self._move("batch_get", transfers, _with_id(extra_info))

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        return self._move("batch_set", transfers, _with_id(extra_info))

    def _move(
        self, operation: str, transfers: Sequence[PoolTransfer], info: HiCacheStorageExtraInfo
    ) -> dict[PoolName, list[bool]]:
        check_transfers(transfers)
        pools = [transfer.name for transfer in transfers]
        # Keys that are no list are refused by the inner storage.
        pages = sum(
            len(transfer.keys) for transfer in transfers if isinstance(transfer.keys, Sequence)
        )
        with (
            RequestScope(info.request_id or "") as name,
            self._spans.call(operation, name, pools, pages) as span,
        ):
            move = self.inner.batch_get_v2 if operation == "batch_get" else self.inner.batch_set_v2
            answers = move(transfers, info)
            span.set_attribute(HITS, sum(map(sum, answers.values())))
            span.set_attribute(BYTES, self._bytes(answers))
        return answers

    def _bytes(self, answers: Mapping[PoolName, Sequence[bool]]) -> int:
        """Return the bytes of the pages answered with `True`.

        Pages that a set has found stored count, too.
        """
        return sum(sum(pages) * self._page_bytes.get(name, 0) for name, pages in answers.items())


def _with_id(extra_info: HiCacheStorageExtraInfo | None) -> HiCacheStorageExtraInfo:
    check_info(extra_info)
    info = extra_info or HiCacheStorageExtraInfo()
    return replace(info, request_id=call_request_id(info.request_id))
