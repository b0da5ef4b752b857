"""Run pip-audit on this environment, without the findings that accepted-findings.toml accepts
today; `make audit`.

Exits with 1 if a package has another known weakness. Where the service cannot be reached, or does
not know our packages (a mirror of PyPI has no advisories), it says NOT AUDITED and exits with 0, or
with 2 given `--required`.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

ACCEPTED = Path(__file__).with_name("accepted-findings.toml")
PROBE = "packaging"
"""A package that every service knows; asked for alone first, so that none is asked for hundreds for
nothing."""


def main() -> int:
    """Audit, and print what was found."""
    ignored = [f"--ignore-vuln={one}" for one in accepted(ACCEPTED, datetime.date.today())]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(f"{PROBE}=={version(PROBE)}\n")
        file.flush()
        found = audited("--requirement", file.name, "--no-deps", "--disable-pip")
    known = [one for one in found if "vulns" in one]
    if known:
        found = audited("--local", "--skip-editable", *ignored)
        known = [one for one in found if "vulns" in one]
    if not known:
        reason = found[0]["skip_reason"] if found else "the vulnerability service does not answer"
        print(f"NOT AUDITED: {reason}", file=sys.stderr)
        return 2 if "--required" in sys.argv else 0
    weak = [(one, weakness) for one in known for weakness in one["vulns"]]
    for one, weakness in weak:
        ids = ", ".join(sorted({weakness["id"], *weakness["aliases"]}))
        fixed = ", ".join(weakness["fix_versions"]) or "no version"
        print(f"{one['name']} {one['version']}: {ids}; fixed in {fixed}")
    print(f"{len(known)} packages audited, {len(found) - len(known)} unknown: {len(weak)} findings")
    return 1 if weak else 0


def accepted(file: Path, today: datetime.date) -> list[str]:
    """Ids of the findings that are accepted today.

    Raises:
        ValueError: an entry lacks something: a reason and an end are wanted of each.
    """
    ids = list[str]()
    for number, entry in enumerate(tomllib.loads(file.read_text("utf-8")).get("accepted", []), 1):
        match entry:
            case {"id": str(one), "reason": str(reason), "until": datetime.date() as until} if (
                reason.strip()
            ):
                ids += [one] if today <= until else []
            case _:
                raise ValueError(f"{file.name}, entry {number}: an id, a reason, a day in `until`")
    return ids


def audited(*options: str) -> list[dict[str, Any]]:
    """Ask the service about packages; nothing if it does not answer."""
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off"]
    done = subprocess.run(
        [*command, "--timeout", "15", *options], capture_output=True, text=True, check=False
    )
    try:
        found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        print(done.stderr.strip(), file=sys.stderr)
        return []
    return found


if __name__ == "__main__":
    sys.exit(main())
