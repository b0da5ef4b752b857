"""Limits of the layout that import-linter does not know; `importlinter.toml` has the layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import run_python

ROOT = Path(__file__).parents[2]
PACKAGES = [
    ROOT / "hicache_storage",
    ROOT / "backends" / "hicache_backends",
    ROOT / "conformance" / "hicache_conformance",
    ROOT / "metadata_server" / "hicache_metadata_server",
]


def test_every_folder_is_a_package():
    # A folder without `__init__.py` is invisible to import-linter, and so are its imports.
    for root in PACKAGES:
        for folder in {path.parent for path in root.rglob("*.py")}:
            assert (folder / "__init__.py").is_file(), folder


SERVER = "hicache_metadata_server"
PARTS_OF_SERVER = {f"{SERVER}.{path.stem}" for path in PACKAGES[-1].iterdir()}
HEAVY = {"torch", "numpy", "pytest", "hypothesis", "starlette"}


@pytest.mark.parametrize(
    ("imported", "unwanted"),
    [
        (
            f"hicache_backends.hf3fs.driver, {SERVER}.client.http_client",
            PARTS_OF_SERVER - {f"{SERVER}.client", f"{SERVER}.protocol"},
        ),
        (
            f"{SERVER}.core.service, {SERVER}.core.sglang, {SERVER}.cli.main",
            HEAVY | {"uvicorn", "pydantic", "prometheus_client", "structlog", "sqlite3"},
        ),
        # Every command builds all others; torch alone takes longer to import than most of them run.
        ("hicache_storage.cli.main; hicache_storage.cli.main.app()", HEAVY),
    ],
    ids=["driver of 3FS", "state machine", "command line"],
)
def test_what_is_not_needed_is_not_imported(imported, unwanted):
    found = run_python(f"import sys, {imported}\nprint(*sys.modules)")
    assert unwanted.isdisjoint(found.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "loaded"),
    [
        (["metadata", "--help"], {"hicache_metadata_server"}),
        (["conformance", "--help"], {"hicache_conformance"}),
        (
            ["unknown"],
            {"hicache_metadata_server", "hicache_conformance", "hicache_storage.cli.bench"},
        ),
    ],
)
def test_a_package_that_is_not_asked_for_is_not_imported(arguments, loaded):
    # The server is started by an operator's tools, and each command by scripts: others' modules take
    # as long as their own.
    code = (
        "import sys\n"
        "from hicache_storage.cli.main import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    pass\n"
        "wanted = ('hicache_metadata_server', 'hicache_conformance', 'hicache_storage.cli.bench')\n"
        "print(*[name for name in wanted if name in sys.modules], file=sys.stderr)"
    )
    found = run_python(code, *arguments)
    assert set(found.stderr.split("\n")[-2].split()) == loaded
