"""An author of a driver: a directory, and a virtual environment for installs."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Author:
    """Installs this project's own distribution, as pip does it for everybody.

    Its dependencies are those of our environment.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        venv.create(home / "venv", with_pip=False, symlinks=True)
        self.scripts = home / "venv" / "bin"
        self.python = self.scripts / "python"
        packages = Path(
            sysconfig.get_path(
                "purelib", vars={"base": str(home / "venv"), "platbase": str(home / "venv")}
            )
        )
        # What our environment has, torch above all, does not have to be installed again; what is
        # installed here comes first.
        current = sysconfig.get_path("purelib")
        (packages / "zz_current_environment.pth").write_text(
            f"import site; site.addsitedir({current!r})\n"
        )
        for name in ("pip", "pytest"):
            self._command(name)
        self.environment = {
            "PATH": f"{self.scripts}:/usr/bin:/bin",
            "HOME": str(home),
            "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
            "COLUMNS": "200",
            # Everything that is needed is installed, the build backend included.
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_CONFIG_FILE": os.devnull,
        }

    def install(self, *packages: Path) -> None:
        """Install distributions, without looking at what they depend on."""
        done = self.shell("pip install -q --no-deps " + " ".join(map(str, packages)))
        assert done.returncode == 0, done.stdout

    def shell(self, command: str, *, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a line as a shell does; standard error goes where standard output goes."""
        return subprocess.run(
            ["/bin/bash", "-c", command],
            cwd=cwd or self.home,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )

    def _command(self, module: str) -> None:
        """A command of our environment, run by this one's interpreter."""
        script = self.scripts / module
        script.write_text(f'#!/bin/sh\nexec "{self.python}" -P -m {module} "$@"\n')
        script.chmod(0o755)
