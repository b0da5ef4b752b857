"""Digest of the files that a driver is made of."""

from __future__ import annotations

import hashlib
import os
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_conformance.model.outcomes import DriverFiles
from hicache_storage.hookspecs import ENTRY_POINT_GROUP
from hicache_storage.plugins import registry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def modules_of(driver: str) -> list[str]:
    """Return the modules of a driver's class, of its options and of its registration.

    Empty for a driver that no plugin registers.
    """
    spec = registry().drivers.get(driver)
    if spec is None:
        return []
    distribution, _, point = registry().owners[driver].partition(":")
    plugins = [
        found.module
        for found in entry_points(group=ENTRY_POINT_GROUP, name=point)
        if found.dist is not None and found.dist.name == distribution
    ]
    return [spec.target, spec.config, *plugins]


def driver_files(modules: Iterable[str]) -> DriverFiles:
    """Return the files of the top-level packages that hold some modules, and their digest.

    Nothing of the packages is imported. Files that Python or a tool leaves there do not count:
    `__pycache__`, and whatever begins with a dot. A namespace package counts as far as it is not
    shared: `acme.store` of `acme.store.driver`.

    Args:
        modules: names, with or without `:Class`.
    """
    found = dict[str, Path]()
    packages = list[str]()
    for module in dict.fromkeys(name.partition(":")[0] for name in modules):
        package, places = _package(module)
        if package and package not in packages:
            packages.append(package)
            found.update(_files(package, places))
    # What `sha256sum` prints, so that it can be had without this suite.
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n"
        for name, path in sorted(found.items(), key=lambda item: item[0].encode())
    ]
    digest = hashlib.sha256("".join(lines).encode()).hexdigest() if lines else ""
    return DriverFiles(packages=tuple(sorted(packages)), count=len(lines), sha256=digest)


def _package(module: str) -> tuple[str, list[Path]]:
    """Return the outermost package of a module that is no namespace, and where it is.

    An empty name where it cannot be found.
    """
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        try:
            spec = find_spec(name)
        except (ImportError, ValueError):
            return "", []
        if spec is None:
            return "", []
        if spec.submodule_search_locations is None:
            return name, [Path(spec.origin)] if spec.origin else []
        if spec.origin is not None:
            return name, [Path(place) for place in spec.submodule_search_locations]
    return "", []


def _files(package: str, places: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    """Yield the files of a package, by names that begin with the package's."""
    home = Path(*package.split("."))
    for place in places:
        if place.is_file():
            yield (home.parent / place.name).as_posix(), place
        for directory, inner, names in os.walk(place):
            inner[:] = [name for name in inner if name != "__pycache__" and name[0] != "."]
            for name in names:
                path = Path(directory, name)
                if name[0] != "." and path.suffix != ".pyc" and path.is_file():
                    yield (home / path.relative_to(place)).as_posix(), path
