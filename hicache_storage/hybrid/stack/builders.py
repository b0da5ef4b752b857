"""Building a stack: everything or nothing, on every rank alike."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from hicache_storage.hybrid.agreement import GroupAgreement, SingleRank
from hicache_storage.hybrid.alike import agreed, check_alike
from hicache_storage.hybrid.attachment import close_quietly
from hicache_storage.hybrid.controller import STOP_SECONDS, HybridCacheController
from hicache_storage.hybrid.radix import HiMambaRadixCache, RadixCacheConfig
from hicache_storage.hybrid.stack.config import DSAStackConfig, MambaStackConfig, StackConfig
from hicache_storage.hybrid.stack.parts import make_parts
from hicache_storage.hybrid.stack.same import SAME_FIELDS, same_on_all
from hicache_storage.hybrid.stack.stack import DSAHybridStack, MambaHybridStack
from hicache_storage.hybrid.stats import StatsCounter
from hicache_storage.spec import ConfigError, PoolName
from hicache_storage.transfer import CudaDevice, CudaStream, StreamSimulator
from hicache_storage.transfer.cuda.device import cuda_device

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicache_storage.hybrid.agreement import Agreement
    from hicache_storage.hybrid.stack.parts import Parts
    from hicache_storage.hybrid.stack.stack import HybridStack
    from hicache_storage.spec import HiCacheStorage
    from hicache_storage.transfer import Device, Stream

StackT = TypeVar("StackT", bound="HybridStack")


def build_mamba_hybrid_stack(
    config: MambaStackConfig | Callable[[], MambaStackConfig],
    *,
    storage: HiCacheStorage | None = None,
    agreement: Agreement | None = None,
    streams: tuple[Device, Stream] | None = None,
) -> MambaHybridStack:
    """The cache of a model with attention and recurrent states, ready to serve. A collective.

    What is refused on one rank, or differs between ranks and must not, is refused on all, before anything is allocated.

    Args:
        config: or, with `agreement`, what makes it: then ranks do not wait for one that cannot make its own.
        storage: made by the caller with `config.identity()`, instead of `config.storage`. The stack owns it; a build that
            fails closes it.
        agreement: decides with the other ranks; None makes one over torch.distributed where there are several.
        streams: what makes the streams of the copies, and the model's own, both the caller's. None means the current CUDA
            stream of `config.device`, or on the CPU a simulator that the stack closes.

    Raises:
        ConfigError: the device is not there, ranks are not those of torch.distributed or were told different things, there
            are two storages, or the storage keeps other bytes; the message names the field. Nothing is open then.
        OtherRankError: another rank refuses, or cannot do its part.
        HiCacheError: as pools, `create_storage` and `HybridCacheController.attach` raise them; nothing is open then.
    """
    return _build(MambaHybridStack, MambaStackConfig, config, storage, agreement, streams)


def build_dsa_hybrid_stack(
    config: DSAStackConfig | Callable[[], DSAStackConfig],
    *,
    storage: HiCacheStorage | None = None,
    agreement: Agreement | None = None,
    streams: tuple[Device, Stream] | None = None,
) -> DSAHybridStack:
    """The cache of a model with latent attention and an indexer; otherwise as `build_mamba_hybrid_stack`."""
    return _build(DSAHybridStack, DSAStackConfig, config, storage, agreement, streams)


def _build(
    kind: type[StackT],
    described: type[StackConfig],
    given: StackConfig | Callable[[], StackConfig],
    storage: HiCacheStorage | None,
    agreement: Agreement | None,
    streams: tuple[Device, Stream] | None,
) -> StackT:
    with ExitStack() as closing, ExitStack() as failing:
        if storage is not None:
            seconds = given.stop_seconds if isinstance(given, StackConfig) else STOP_SECONDS
            failing.callback(close_quietly, storage, seconds, StatsCounter())
        if agreement is None:
            given = _made(described, given)
            agreement = _agreement(given, closing)
        config = _agreed_config(described, given, storage, agreement, streams)
        host_slots = _host_slots(config, agreement)
        parts = agreed(agreement, "pools", lambda: _parts(config, host_slots, streams, closing))
        stack = kind(config, parts, *_caches(config, parts, agreement, closing), agreement)
        wanted = config.storage if storage is None else storage
        if wanted is not None:
            stack.attach(wanted)
        failing.pop_all()
        stack.own(closing.pop_all())
    return stack


def _made(described: type[StackConfig], given: StackConfig | Callable[[], StackConfig]) -> StackConfig:
    config = given if isinstance(given, StackConfig) else given()
    if not isinstance(config, described):
        raise ConfigError(f"config must be a {described.__name__}, got {type(config).__name__}")
    return config


def _agreed_config(
    described: type[StackConfig],
    given: StackConfig | Callable[[], StackConfig],
    storage: HiCacheStorage | None,
    agreement: Agreement,
    streams: tuple[Device, Stream] | None,
) -> StackConfig:
    """The config that no rank refuses, and that does not differ where it must not. A collective."""
    config, refusal = None, None
    values: Mapping[str, object] = dict.fromkeys(SAME_FIELDS)
    try:
        config = _made(described, given)
        _check(config, storage, streams)
        values = same_on_all(config, storage)
    except BaseException as error:  # noqa: BLE001 - raised below, once the other ranks know
        refusal = error
    check_alike(agreement, values, refusal)
    assert config is not None
    return config


def _check(config: StackConfig, storage: HiCacheStorage | None, streams: tuple[Device, Stream] | None) -> None:
    if storage is not None and config.storage is not None:
        raise ConfigError("storage: config.storage names one, too; give one of them")
    place = torch.device(config.device)
    if place.type == "cuda" and streams is None:
        if not torch.cuda.is_available():
            raise ConfigError(f"device is {config.device!r}, and CUDA is not available here; pass 'cpu'")
        cuda_device(place)


def _agreement(config: StackConfig, closing: ExitStack) -> Agreement:
    if config.parallel.replica_size == 1:
        return SingleRank()
    if not dist.is_initialized():
        raise ConfigError(
            f"parallel has {config.parallel.replica_size} ranks that serve together, and torch.distributed is not initialized; "
            "call init_process_group before, or pass agreement"
        )
    agreement = GroupAgreement.of(config.parallel)
    closing.callback(agreement.close)
    return agreement


def _host_slots(config: StackConfig, agreement: Agreement) -> dict[PoolName, int]:
    """Slots of each host pool; of a size in memory, as many as fit on every rank. A collective."""
    mine = {name: config.slots_of(name)[1] for name in config.pools}
    least = dict(zip(mine, agreement.minimum(list(mine.values())), strict=True))
    return {name: least[name] if config.is_sized_by_memory(name) else count for name, count in mine.items()}


def _parts(
    config: StackConfig, host_slots: Mapping[PoolName, int], streams: tuple[Device, Stream] | None, closing: ExitStack
) -> Parts:
    place = torch.device(config.device)
    # Host memory is locked in the context of the current device.
    with torch.cuda.device(place) if place.type == "cuda" else nullcontext():
        parts = make_parts(config, host_slots, *(streams or _own_streams(config, closing)))
    closing.callback(parts.transfers.synchronize)
    return parts


def _own_streams(config: StackConfig, closing: ExitStack) -> tuple[Device, Stream]:
    place = torch.device(config.device)
    if place.type == "cuda":
        return CudaDevice(place), CudaStream(torch.cuda.current_stream(place))
    simulator = closing.enter_context(StreamSimulator(pause_seconds=0))
    return simulator, simulator.stream("compute")


def _caches(
    config: StackConfig, parts: Parts, agreement: Agreement, closing: ExitStack
) -> tuple[HybridCacheController, HiMambaRadixCache]:
    controller = HybridCacheController(
        parts.group,
        transfers=parts.transfers,
        parallel=config.parallel,
        agreement=agreement,
        rules=config.prefetch,
        bigram=config.bigram,
        storage_call_seconds=config.storage_call_seconds,
        attach_seconds=config.attach_seconds,
        stop_seconds=config.stop_seconds,
    )
    closing.callback(controller.close)
    rules = RadixCacheConfig(
        page_size=config.page_size,
        checkpoint_grid=config.checkpoint_grid,
        write_policy=config.write_policy,
        bigram=config.bigram,
    )
    return controller, HiMambaRadixCache(
        rules, controller, parts.device_pools[PoolName.KV], parts.device_pools.get(PoolName.MAMBA)
    )
