"""The persistence file that SGLang's own metadata server writes, imported: the same answers."""

from __future__ import annotations

import json
import random

import pytest

from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.core.sglang import SglangService
from hicache_metadata_server.core.sglang_import import import_scopes, read_persistence_file
from hicache_metadata_server.protocol import Fsck, SglangKeys

pytestmark = pytest.mark.interop


@pytest.mark.parametrize("form", ["rank and namespace", "bare rank"])
def test_what_sglang_has_written_is_read(tmp_path, form):
    from sglang.srt.mem_cache.storage.hf3fs.mini_3fs_metadata_server import (
        GlobalMetadataState,
        RankMetadata,
    )

    chance, file = random.Random(9), tmp_path / "metadata.json"
    state = GlobalMetadataState(str(file), 60)
    asked, told = {}, {}
    for number, namespace in (
        ((0, "kv"), (1, "kv"), (0, "mamba"))
        if form == "rank and namespace"
        else ((0, "kv"), (1, "kv"))
    ):
        rank = state.ranks[f"{number}:{namespace}"] = RankMetadata(200)
        keys = [f"{chance.getrandbits(256):064x}" for _ in range(150)]
        reserved = rank.reserve_and_allocate_page_indices([(key, "") for key in keys])
        rank.confirm_write(
            [(key, page) for key, (_, page) in zip(keys[:140], reserved, strict=False)],
            [page for _, page in reserved[140:]],
        )
        rank.delete_keys(chance.sample(keys, 20))
        asked[number, namespace], told[number, namespace] = keys, rank.get_page_indices(keys)
    state.save_to_disk()
    if form == "bare rank":
        file.write_text(
            json.dumps(
                {
                    name.removesuffix(":kv"): rank
                    for name, rank in json.loads(file.read_text()).items()
                }
            )
        )
    service = MetadataService()
    found = read_persistence_file(file.read_bytes())
    import_scopes(service, found, 100.0)
    assert all(not scope.dropped and not scope.lost for scope in found)
    for (number, namespace), keys in asked.items():
        answer = SglangService(service).get_page_indices(
            number, SglangKeys(keys=keys, namespace=namespace), 101.0
        )
        assert answer == {"indices": told[number, namespace]}
    assert list(service.fsck(Fsck()))[-1].problems == []
