"""The settings of a pytest session, from wherever they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest

from hicache_conformance.manifest import parse_levels
from hicache_conformance.profiles import PROFILES
from hicache_conformance.settings import RunFile, Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

WORKER_KEY: Final = "hicache_settings"
"""Under which pytest-xdist's workers find the controller's settings."""
_SETTINGS: Final = pytest.StashKey[Settings]()


def settings_of(config: pytest.Config) -> Settings:
    """The settings of this session: the command line's, the controller's, or those of pytest's options. Always the same.

    Raises:
        pytest.UsageError: an option has a bad value.
    """
    if _SETTINGS not in config.stash:
        handed: Mapping[str, Any] | None = getattr(config, "workerinput", {}).get(WORKER_KEY)
        if handed:
            config.stash[_SETTINGS] = msgspec.convert(handed, Settings)
        else:
            run = RunFile.of_environment()
            config.stash[_SETTINGS] = run.settings if run else _of_options(config)
    return config.stash[_SETTINGS]


def _of_options(config: pytest.Config) -> Settings:
    profile, levels_text = str(config.getoption("--hicache-profile")), str(config.getoption("--hicache-level"))
    if profile not in PROFILES:
        raise pytest.UsageError(f"--hicache-profile: unknown profile {profile!r}; profiles are {', '.join(PROFILES)}")
    try:
        levels = parse_levels(levels_text)
    except ValueError as error:
        raise pytest.UsageError(f"--hicache-level: {error}") from error
    return Settings.fresh(config.getoption("--hicache-seed"), profile, levels)
