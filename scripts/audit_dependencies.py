"""Asks a vulnerability service about every package of this environment; `make audit`.

Exits with 1 if a package has a known weakness that `accepted-findings.toml` does not accept today.
Where the service cannot be reached, or does not know our packages (a mirror of PyPI has no
advisories), it says NOT AUDITED and exits with 0, or with 2 given `--required`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

ACCEPTED = Path(__file__).with_name("accepted-findings.toml")
PROBE = "packaging"
"""A package that every service knows; asked for alone first."""
SECONDS = 300


class NotAuditedError(Exception):
    """The service says nothing about our packages."""


@dataclass(frozen=True)
class Acceptance:
    """A finding that is accepted for a time."""

    id: str
    package: str
    reason: str
    until: datetime.date


@dataclass
class Verdict:
    """What came of it."""

    audited: int = 0
    unknown: list[str] = field(default_factory=list)
    """Packages that the service does not know."""
    findings: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    """Acceptances of what is not found any more."""


def main() -> int:
    """Audit, and tell."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument(
        "--required", action="store_true", help="fail where nothing could be audited"
    )
    required, begin = parser.parse_args().required, time.monotonic()
    acceptances = read_accepted(ACCEPTED)
    try:
        probe()
        verdict = judge(
            asked("--local", "--skip-editable"),
            acceptances,
            datetime.datetime.now(datetime.UTC).date(),
        )
    except NotAuditedError as error:
        print(f"NOT AUDITED: {error}", file=sys.stderr)
        return 2 if required else 0
    for text in (
        *verdict.findings,
        *(f"accepted: {one}" for one in verdict.accepted),
        *(f"not found any more: {one}" for one in verdict.unused),
    ):
        print(text)
    if verdict.unknown:
        print(f"not audited, the service does not know them: {', '.join(verdict.unknown)}")
    print(
        f"{verdict.audited} packages audited in {time.monotonic() - begin:.0f} s: "
        f"{len(verdict.findings) or 'no'} findings"
    )
    return 1 if verdict.findings else 0


def read_accepted(file: Path) -> list[Acceptance]:
    """The accepted findings.

    Raises:
        ValueError: an entry lacks something: a reason and an end are wanted of each.
    """
    entries = tomllib.loads(file.read_text("utf-8")).get("accepted", [])
    found = list[Acceptance]()
    for number, entry in enumerate(entries, 1):
        try:
            one = Acceptance(**entry)
        except TypeError as error:
            raise ValueError(f"{file.name}, entry {number}: {error}") from error
        if not one.reason.strip() or not isinstance(one.until, datetime.date):
            raise ValueError(f"{file.name}, entry {number}: a reason, and a day in `until`")
        found.append(one)
    return found


def probe() -> None:
    """Ask about one package, so that no service is asked about hundreds for nothing.

    Raises:
        NotAuditedError: it is not known.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(f"{PROBE}=={version(PROBE)}\n")
        file.flush()
        (known,) = asked("--requirement", file.name, "--no-deps", "--disable-pip")
    if "skip_reason" in known:
        raise NotAuditedError(
            f"the vulnerability service does not answer for packages of PyPI: "
            f"{known['skip_reason']}"
        )


def asked(*what: str) -> list[dict[str, Any]]:
    """What the service says of some packages.

    Raises:
        NotAuditedError: it does not answer.
    """
    command = [
        sys.executable,
        "-m",
        "pip_audit",
        "--format",
        "json",
        "--progress-spinner",
        "off",
        "--timeout",
        "15",
        *what,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise NotAuditedError(f"no answer within {SECONDS} s") from None
    try:
        dependencies: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (done.stderr.strip().splitlines() or ["pip-audit says nothing"])[-1]
        raise NotAuditedError(f"the vulnerability service cannot be reached: {last}") from None
    return dependencies


def judge(
    dependencies: list[dict[str, Any]], acceptances: list[Acceptance], today: datetime.date
) -> Verdict:
    """What of a report counts."""
    verdict, used = Verdict(), set[str]()
    for one in dependencies:
        if "skip_reason" in one:
            verdict.unknown.append(one["name"])
            continue
        verdict.audited += 1
        for weakness in one["vulns"]:
            ids = {weakness["id"], *weakness["aliases"]}
            acceptance = next(
                (a for a in acceptances if a.package == one["name"] and a.id in ids), None
            )
            told = f"{one['name']} {one['version']}: {', '.join(sorted(ids))}; fixed in {', '.join(weakness['fix_versions']) or 'no version'}"
            if acceptance is None:
                verdict.findings.append(told)
                continue
            used.add(acceptance.id)
            if acceptance.until < today:
                verdict.findings.append(
                    f"{told}; was accepted until {acceptance.until}: {acceptance.reason}"
                )
            else:
                verdict.accepted.append(f"{told}; until {acceptance.until}: {acceptance.reason}")
    if not verdict.audited:
        raise NotAuditedError("the vulnerability service knows none of our packages")
    verdict.unused = [one.id for one in acceptances if one.id not in used]
    return verdict


if __name__ == "__main__":
    sys.exit(main())
