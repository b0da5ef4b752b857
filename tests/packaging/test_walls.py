"""Who may import whom: arrows point down, and rooms do not look into each other."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {
    "hicache_storage": ROOT / "hicache_storage",
    "hicache_backends": ROOT / "backends" / "hicache_backends",
    "hicache_conformance": ROOT / "conformance" / "hicache_conformance",
    "hicache_metadata_server": ROOT / "metadata_server" / "hicache_metadata_server",
}
# What each room may import of the project, besides itself.
ALLOWED = {
    "hicache_storage.spec": set(),
    "hicache_storage.pools": {"hicache_storage.spec"},
    "hicache_storage.transfer": {"hicache_storage.spec", "hicache_storage.pools"},
    "hicache_storage.observability": {"hicache_storage.spec"},
    "hicache_storage.objects": {
        "hicache_storage.spec",
        "hicache_storage.pools",
        "hicache_storage.observability",
    },
    "hicache_storage.layers": {
        "hicache_storage.spec",
        "hicache_storage.pools",
        "hicache_storage.objects",
        "hicache_storage.observability",
    },
    "hicache_storage.testing": {
        "hicache_storage.spec",
        "hicache_storage.pools",
        "hicache_storage.transfer",
        "hicache_storage.objects",
        "hicache_storage.layers",
    },
    "hicache_storage.hookspecs": {"hicache_storage.spec"},
    "hicache_storage.plugins": {
        "hicache_storage.spec",
        "hicache_storage.layers",
        "hicache_storage.hookspecs",
    },
    "hicache_storage.engines": {
        "hicache_storage.spec",
        "hicache_storage.pools",
        "hicache_storage.layers",
        "hicache_storage.observability",
        "hicache_storage.plugins",
    },
    "hicache_storage.hybrid": {
        "hicache_storage.spec",
        "hicache_storage.pools",
        "hicache_storage.objects",
        "hicache_storage.transfer",
        "hicache_storage.layers",
        "hicache_storage.observability",
        "hicache_storage.plugins",
    },
    "hicache_storage.tools": {
        "hicache_storage.spec",
        "hicache_storage.pools",
        "hicache_storage.objects",
        "hicache_storage.layers",
        "hicache_storage.observability",
        "hicache_storage.plugins",
        "hicache_storage.hookspecs",
    },
    "hicache_storage.cli": {
        "hicache_storage.spec",
        "hicache_storage.plugins",
        "hicache_storage.hookspecs",
        "hicache_storage.observability",
        "hicache_storage.tools",
    },
    # The local client is imported where it is used: see
    # test_the_3fs_driver_does_without_the_server.
    "hicache_backends": {
        "hicache_storage",
        "hicache_metadata_server.protocol",
        "hicache_metadata_server.client.tls",
        "hicache_metadata_server.client.embedded",
    },
    # A command of its own.
    "hicache_backends.mooncake.cli": {"hicache_storage", "hicache_backends"},
    # The state machine without its server.
    "hicache_metadata_server.client.embedded": {
        "hicache_storage",
        "hicache_backends",
        "hicache_metadata_server",
        "hicache_metadata_server.protocol",
    },
    # The judge and the judged share the messages, and nothing else.
    "hicache_conformance": {"hicache_storage", "hicache_metadata_server.protocol"},
    "hicache_metadata_server": {
        "hicache_storage",
        "hicache_metadata_server.protocol",
        "hicache_metadata_server.client.tls",
        "hicache_metadata_server.backup.checking",
    },
    "hicache_metadata_server.protocol": set(),
    # What clients ask of a server's certificate.
    "hicache_metadata_server.client.tls": set(),
    # Reads the driver's files as the driver does, where an operator wants them compared with the
    # map.
    "hicache_metadata_server.backup.checking": {
        "hicache_storage",
        "hicache_metadata_server",
        "hicache_metadata_server.protocol",
        "hicache_backends",
    },
}
# Libraries that belong to one room; everywhere else they would make an import heavy.
HOMES = {
    "sglang": {"hicache_storage.engines"},
    "typer": {
        "hicache_storage.cli",
        "hicache_backends.mooncake.cli",
        "hicache_conformance",
        "hicache_metadata_server",
    },
    "rich": {"hicache_storage.cli", "hicache_conformance", "hicache_metadata_server"},
    "pytest": {"hicache_conformance"},
    "hypothesis": {"hicache_conformance"},
    "jinja2": {"hicache_conformance"},
    "prometheus_client": {"hicache_storage.observability", "hicache_metadata_server"},
    "opentelemetry": {"hicache_storage.observability"},
    "fastapi": {"hicache_metadata_server"},
    "uvicorn": {"hicache_metadata_server"},
    "structlog": {"hicache_metadata_server"},
    "pydantic_settings": {"hicache_metadata_server"},
    "aiohttp": {"hicache_backends"},
}
SHARED = "posix"
"""What drivers have in common."""


def modules():
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join((package, *(part for part in parts if part != "__init__"))), path


def room(module: str) -> str:
    parts = module.split(".")
    if parts[:4] == ["hicache_backends", "hf3fs", "client", "embedded"]:
        return ".".join(parts[:4])
    if parts[:3] == ["hicache_backends", "mooncake", "cli"]:
        return ".".join(parts[:3])
    if parts[:3] == ["hicache_metadata_server", "snapshots", "checking"]:
        return ".".join(parts[:3])
    if parts[:2] in (
        ["hicache_metadata_server", "protocol"],
        ["hicache_metadata_server", "client_tls"],
    ):
        return ".".join(parts[:2])
    return ".".join(parts[:2]) if parts[0] == "hicache_storage" and len(parts) > 1 else parts[0]


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(
    ("module", "path"), [pytest.param(*pair, id=pair[0]) for pair in modules()]
)
def test_imports_stay_within_the_walls(module, path):
    here = room(module)
    for name in imports(path):
        top = name.split(".")[0]
        if top in SOURCES and here != "hicache_storage":
            there = room(name)
            permitted = ALLOWED[here]
            assert there == here or there in permitted or top in permitted, (
                f"{module} imports {name}"
            )
            assert top in (here.split(".")[0], "hicache_storage") or there in permitted, (
                f"{module} imports {name}"
            )
        if top in HOMES:
            assert here in HOMES[top], (
                f"{module} imports {name}; {top} belongs into {', '.join(HOMES[top])}"
            )


def test_backends_do_not_know_each_other():
    for module, path in modules():
        if module.startswith("hicache_backends."):
            mine = module.split(".")[1]
            for name in imports(path):
                if name.startswith("hicache_backends.") and name.split(".")[1] not in (
                    mine,
                    SHARED,
                ):
                    pytest.fail(f"{module} imports {name}")


def test_the_3fs_driver_does_without_the_server():
    code = (
        "import sys, hicache_backends.hf3fs.driver, hicache_metadata_server.client.http_client\n"
        "print(*[name for name in sys.modules if name.startswith('hicache_metadata_server.')])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert {room(name) for name in found.stdout.split()} == {"hicache_metadata_server.protocol"}


def test_every_room_has_rules():
    assert {room(module) for module, _ in modules()} - {"hicache_storage"} <= set(ALLOWED)


def test_a_wrong_import_would_be_found(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from hicache_storage.objects import ObjectStorage\nimport sglang.srt\n")
    assert list(imports(wrong)) == ["hicache_storage.objects.ObjectStorage", "sglang.srt"]
    assert room("hicache_storage.objects.ObjectStorage") not in ALLOWED["hicache_storage.spec"]
