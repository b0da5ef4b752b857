"""Virtual environments in which everything is installed, and no index is asked."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


def furnished(home: Path) -> dict[str, str]:
    """An environment in which everything is installed: that of the tests, with this checkout's
    wheel before it."""
    scripts, packages = make_venv(home, with_pip=False)
    (packages / "_checkout.pth").write_text(f"{_unpacked_wheel()}\n")
    # What our environment has, torch above all, does not have to be installed again; what is
    # installed here comes first.
    (packages / "zz_current_environment.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )
    for name, code in (
        ("pip", "-m pip"),
        ("pytest", "-m pytest"),
        ("hicache", f'"{home}/venv/hicache.py"'),
    ):
        (scripts / name).write_text(f'#!/bin/sh\nexec "{scripts}/python" -P {code} "$@"\n')
        (scripts / name).chmod(0o755)
    (home / "venv" / "hicache.py").write_text(
        # As pip writes it: `doctor` starts a process that imports this file again.
        "from hicache_storage.cli.main import main\n\nif __name__ == '__main__':\n    main()\n"
    )
    # Everything that is needed is installed, the build backend included.
    return {
        **variables(home),
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_CONFIG_FILE": os.devnull,
    }


def make_venv(home: Path, *, with_pip: bool) -> tuple[Path, Path]:
    """Make one below `home`; the directories of its commands and of its packages."""
    venv.create(home / "venv", with_pip=with_pip, symlinks=True)
    prefix = str(home / "venv")
    packages = sysconfig.get_path("purelib", vars={"base": prefix, "platbase": prefix})
    return home / "venv" / "bin", Path(packages)


def variables(home: Path) -> dict[str, str]:
    """What a shell in it knows."""
    path = f"{home / 'venv' / 'bin'}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    return {
        "PATH": path,
        "HOME": str(home),
        "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
        "COLUMNS": "200",
        "LANG": "C.UTF-8",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


@cache
def _unpacked_wheel() -> Path:
    """This checkout's own wheel, as pip would unpack it: what is missing there is missing for every
    user."""
    directory = Path(tempfile.mkdtemp(prefix="hicache-docs-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory / "site")
    return directory / "site"
