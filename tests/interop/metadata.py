"""Metadata servers for the tests, each a process of its own; and SGLang's driver, pointed at one."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from hicache_metadata_server.cli.options import AdminClient
from hicache_metadata_server.protocol import Fsck, FsckReport, Scopes
from tests.support.metadata import Served

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tests.interop.engine import Rank

WAIT_SECONDS = 60.0
SERVE = (
    f'{sys.executable} -c "from hicache_storage.cli.main import main; main()" metadata serve '
    f"--port {{port}} "
    "--log-level warning --quarantine-seconds 0.05 --lease-seconds 2 --store sqlite:///"
)


def started() -> Served:
    """Our server on a store of its own."""
    return Served(command=f"{SERVE}{{tmp}}/m.db")


def live(url: str) -> dict[str, int]:
    """How many pages our server says there are, by scope."""
    return {
        scope.scope: scope.live
        for scope in AdminClient(url).call("/v2/scopes", None, Scopes).scopes
    }


def problems(url: str) -> list[str]:
    """What `fsck` finds wrong with our server."""
    return AdminClient(url).call("/v2/fsck", Fsck(), FsckReport).problems


def attach_sglang_hf3fs(
    rank: Rank, url: str, place: Path, monkeypatch: pytest.MonkeyPatch, *, file_size: int = 1 << 20
) -> object:
    """Attach SGLang's driver as an engine does: named `hf3fs`, told the rest by a file, with its
    mock client."""
    file = place / "hf3fs.json"
    file.write_text(
        json.dumps(
            {
                "file_path_prefix": str(place / "hf3fs"),
                "file_size": file_size,
                "numjobs": 2,
                "entries": 8,
                "metadata_server_url": url,
            }
        )
    )
    monkeypatch.setenv("SGLANG_HICACHE_HF3FS_CONFIG_PATH", str(file))
    rank.attach_config({"use_mock_hf3fs_client": True}, backend="hf3fs")
    return rank.controller.storage_backend
