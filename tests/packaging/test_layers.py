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


def test_the_3fs_driver_does_without_the_server():
    code = (
        "import sys, hicache_backends.hf3fs.driver, hicache_metadata_server.client.http_client\n"
        "names = [name for name in sys.modules if name.startswith('hicache_metadata_server.')]\n"
        "print(*{name.split('.')[1] for name in names})"
    )
    found = run_python(code)
    assert set(found.stdout.split()) == {"client", "protocol"}


def test_the_command_line_starts_without_heavy_libraries():
    # Every command builds all others; torch alone takes longer to import than most of them run.
    code = (
        "import sys\n"
        "from hicache_storage.cli.main import app\n"
        "app()\n"
        "print(*sorted({'torch', 'numpy', 'pytest', 'hypothesis', 'starlette'} & set(sys.modules)))"
    )
    found = run_python(code)
    assert found.stdout.split() == []


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


def test_threads_that_decode_a_type_for_the_first_time_do_not_crash():
    # The client of the metadata server does so. msgspec 0.22 ended the engine's process (SIGSEGV).
    code = (
        "import sys, threading, msgspec\n"
        "sys.setswitchinterval(1e-6)\n"
        "body = msgspec.msgpack.encode({'items': [{'number': 1}]})\n"
        "for _ in range(200):\n"
        "    inner = msgspec.defstruct('Inner', [('number', int)])\n"
        "    outer = msgspec.defstruct('Outer', [('items', list[inner])])\n"
        "    decode = lambda: msgspec.msgpack.decode(body, type=outer)\n"
        "    threads = [threading.Thread(target=decode) for _ in range(4)]\n"
        "    for thread in threads: thread.start()\n"
        "    for thread in threads: thread.join()\n"
    )
    run_python(code)
