"""Settings of a pytest session.

Apart from `settings`, because processes that only look up drivers read a run's without pytest.
"""

from __future__ import annotations

import os
from typing import Final

import pytest

from hicache_conformance.model.profiles import PROFILES
from hicache_conformance.model.pytest_keys import drawn_seed
from hicache_conformance.model.rules import parse_levels
from hicache_conformance.model.settings import PAGE_VARIABLE, Settings, parse_page_bytes

_SETTINGS: Final = pytest.StashKey[Settings]()


def settings_of(config: pytest.Config) -> Settings:
    """The settings of this session: the command line's, or those of pytest's options.

    Always the same.

    Raises:
        pytest.UsageError: an option has a bad value.
    """
    # Once a session: a drawn seed must be the same for every case.
    if _SETTINGS not in config.stash:
        config.stash[_SETTINGS] = Settings.of_environment() or _of_options(config)
    return config.stash[_SETTINGS]


def _of_options(config: pytest.Config) -> Settings:
    profile, levels_text = (
        str(config.getoption("--hicache-profile")),
        str(config.getoption("--hicache-level")),
    )
    if profile not in PROFILES:
        raise pytest.UsageError(
            f"--hicache-profile: unknown profile {profile!r}; profiles are {', '.join(PROFILES)}"
        )
    try:
        levels = parse_levels(levels_text)
    except ValueError as error:
        raise pytest.UsageError(f"--hicache-level: {error}") from error
    try:
        page_bytes = parse_page_bytes(str(config.getoption("--hicache-page-bytes")))
    except ValueError as error:
        raise pytest.UsageError(f"--hicache-page-bytes: {error}") from error
    # Pools are made by cases, which see no settings, and in workers, which inherit the environment.
    os.environ[PAGE_VARIABLE] = str(page_bytes)
    seed, run = drawn_seed(config)
    return Settings(seed=seed, run=run, profile=profile, levels=levels, page_bytes=page_bytes)
