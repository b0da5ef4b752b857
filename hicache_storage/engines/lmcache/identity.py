"""Configuration and identity, derived from LMCache's keys and layouts; needs no LMCache."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

from msgspec import Meta

from hicache_storage.engines.bridge_config import BridgeConfig, parse_options
from hicache_storage.spec import StorageIdentity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lmcache.v1.distributed.api import ObjectKey

VERSIONS: Final = ("0.5.6",)
"""Versions of LMCache whose interface the bridge serves."""
WHERE = "adapter_params"
OBJECT_FORMAT = 1
"""Version of `page_format`; another number keeps pages apart."""


class AdapterConfig(BridgeConfig, frozen=True):
    """The bridge's keys in LMCache's `adapter_params`."""

    threads: Annotated[
        int,
        Meta(
            ge=1, le=64, description="Number of lookups, of loads and of stores at the same time."
        ),
    ] = 4


def adapter_config(options: Mapping[str, object]) -> AdapterConfig:
    """Parse the bridge's configuration out of `adapter_params`.

    Raises:
        ConfigError: a key is unknown, missing or has a bad value; the message names it.
    """
    return parse_options(AdapterConfig, options, where=WHERE)


class ObjectLayout(NamedTuple):
    """Shapes and dtypes of the tensors of an object, in their order."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    """Names, without the `torch.` prefix."""

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], dtypes: Sequence[object]) -> ObjectLayout:
        """Return the layout that LMCache describes by shapes and torch's dtypes."""
        return cls(
            tuple(tuple(map(int, shape)) for shape in shapes),
            tuple(str(dtype).removeprefix("torch.") for dtype in dtypes),
        )


class Place(NamedTuple):
    """What objects that share a namespace have in common, beside the configuration."""

    model: str
    kv_rank: int
    """LMCache's number of a worker: world size and rank, globally and on the node."""
    group: int
    layout: ObjectLayout


def object_key(key: ObjectKey) -> str:
    """Return the key of an object in its place, which all salts share: clients choose them."""
    if not key.cache_salt:
        return key.chunk_hash.hex()
    salt = hashlib.blake2b(key.cache_salt.encode(errors="surrogatepass")).digest()
    return hashlib.blake2b(key.chunk_hash, digest_size=32, key=salt).hexdigest()


def place_identity(place: Place, config: AdapterConfig, *, version: str) -> StorageIdentity:
    """Derive the identity of the objects of a place.

    LMCache's own keys tell model, worker and object group, and neither dtype nor layout: of two
    servers on one directory with other dtypes of one width, one would read the other's bytes.

    Args:
        place: where the objects belong.
        config: the bridge's configuration.
        version: LMCache's minor version, which defines the order of the bytes.
    """
    layout = place.layout
    page_format = {
        "engine": "lmcache",
        "object": OBJECT_FORMAT,
        "lmcache": version,
        "kv_rank": f"{place.kv_rank:#010x}",
        "group": place.group,
        "shapes": layout.shapes,
        "dtypes": layout.dtypes,
    }
    return StorageIdentity(
        model=place.model or "unnamed",
        revision=config.revision,
        kv_dtype=config.kv_dtype or (layout.dtypes[0] if layout.dtypes else "unknown"),
        # LMCache tells an adapter the shape of a chunk, and not its tokens.
        page_size=1,
        layout="lmcache",
        page_format=json.dumps(page_format, sort_keys=True, separators=(",", ":")),
        tenant=config.tenant,
        salt=config.salt,
    )
