"""Published files: packages of the wheel, rules in the documents, metadata."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow(seconds=30)

ROOT = Path(__file__).parents[2]


def test_the_wheel_installs_names_of_our_own_only(tmp_path):
    # Built with the hatchling of this environment: isolation would fetch it again.
    build = "import hatchling.build, sys; print(hatchling.build.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        names = wheel.namelist()
    tops = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert tops == {
        "hicache_storage",
        "hicache_backends",
        "hicache_conformance",
        "hicache_metadata_server",
    }
    for package in sorted(tops):
        assert f"{package}/py.typed" in names
    assert "hicache_storage/engines/sglang/bridge.py" in names
    page = ROOT / "metadata_server" / "hicache_metadata_server" / "dashboard" / "static"
    assert {
        f"hicache_metadata_server/dashboard/static/{file.name}" for file in page.iterdir()
    } <= set(names)
    assert not [name for name in names if "test" in name.split("/")[0] or name.endswith(".pyc")]


def test_local_links_in_documents_lead_somewhere():
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*/README.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"
