"""Sets up the `Lab` of a case: fills in the configuration, and asks whether the driver declares what the case needs."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import pytest

from hicache_conformance.catalogue import MARK, described
from hicache_conformance.damage import can_tamper
from hicache_conformance.foreign.promises import dialect
from hicache_conformance.grounds.parameters import ground_in_use
from hicache_conformance.grounds.placeholders import mentions_tmp, port_names
from hicache_conformance.grounds.standing import commands_of, filled_options, standing
from hicache_conformance.lab import Lab
from hicache_conformance.needs import undeclared
from hicache_conformance.options import settings_of
from hicache_conformance.profiles import PROFILES
from hicache_conformance.redact import redacted
from hicache_storage.plugins import create_storage, registry
from hicache_storage.spec import Capabilities, StorageIdentity

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from hicache_conformance.catalogue import Case
    from hicache_conformance.profiles import Profile
    from hicache_conformance.settings import Settings
    from hicache_conformance.target import DriverTarget

_HOMES: Final = pytest.StashKey[dict[str, "Path"]]()

TMP: Final = "{tmp}"
CAPACITY: Final = "capacity_option"
"""What a case needs that limits how much a store holds; drivers name the option in their `DriverSpec`."""
STEPS: Final = "steps"
"""What a case needs that makes the steps of an `ObjectStorage` fail, where there is no other way to the same end."""
DIRECTORY: Final = "a directory that is the whole store"
"""What a case needs that removes files of the store, or adds some: an option names a directory, and no server knows of the pages."""
AMPLE_BYTES: Final = 1 << 30
LAB_PROPERTY: Final = "hicache_lab"
"""User property of a report: driver, capabilities and redacted options, as JSON."""
GATE_PROPERTY: Final = "hicache_gate"
"""User property of a report: what the case needs and the driver does not declare."""


def filled_config(
    driver: str, config: Mapping[str, object], tmp: Path | str, ports: Mapping[str, int] = MappingProxyType({})
) -> dict[str, object]:
    """The options given, and the driver's trial options where none is given, with `{tmp}` and `{port:NAME}` filled in.

    Raises:
        DriverError: there is no such driver.
    """
    return filled_options({**registry().get(driver).trial_config, **config}, tmp, ports)


def instance_capabilities(driver: str, options: Mapping[str, object]) -> Capabilities:
    """What the driver promises with these options.

    Raises:
        DriverError: it cannot be loaded, or refuses the options.
    """
    identity = StorageIdentity(model="conformance/model", kv_dtype="bfloat16", page_size=2, layout="page_first")
    storage = create_storage(driver, identity, options)
    try:
        return storage.capabilities
    finally:
        storage.close()


def require_driver(owner: type[DriverTarget]) -> str:
    """The driver that a class is about.

    Raises:
        pytest.UsageError: it names none.
    """
    if not owner.driver:
        raise pytest.UsageError(f"{owner.__qualname__} names no driver; write: driver = 'the name that `hicache drivers` lists'")
    return owner.driver


def open_lab(owner: DriverTarget, request: pytest.FixtureRequest, config: Mapping[str, object]) -> Iterator[Lab]:
    """The lab of one case; a case whose needs are not declared is skipped here, before it begins."""
    driver = require_driver(type(owner))
    settings = settings_of(request.config)
    sandbox = _sandbox(request, type(owner))
    ground = ground_in_use(request)
    stands = standing(request.config, _name(type(owner)), commands_of(driver, owner.config, owner.services))
    tmp = (ground.tmp if ground else None) or _inner(sandbox)
    options = filled_config(driver, config, tmp, stands.ports(ground))
    capabilities = instance_capabilities(driver, options)
    _tell(request, owner, capabilities, filled_config(driver, config, TMP))
    lab = Lab(
        driver=driver,
        config=options,
        case=request.node.name,
        seed=settings.seed,
        run=settings.run,
        profile=_profile(settings),
        tmp=tmp,
        sandbox=sandbox,
        tamper=owner.tamper,
        transfer_engine=owner.transfer_engine,
        dialect=dialect(),
        capabilities=capabilities,
        ground=ground,
    )
    _gate(owner, request, lab)
    yield lab
    if ground is not None:
        # Otherwise closing would meet the case's faults.
        ground.heal()
    lab.close()


def _gate(owner: DriverTarget, request: pytest.FixtureRequest, lab: Lab) -> None:
    mark = request.node.get_closest_marker(MARK)
    case = described(request.function, dict(mark.kwargs))
    not_promised = _not_promised(request.node.name, lab, case)
    if not_promised:
        request.node.user_properties.append((GATE_PROPERTY, not_promised))
        pytest.skip(f"not declared: {not_promised}")
    missing = _missing(owner, lab, case.needs)
    if missing:
        reason = f"the driver does not declare {' and '.join(missing)}"
        request.node.user_properties.append((GATE_PROPERTY, reason))
        if not case.probes:
            pytest.skip(f"not declared: {reason}")
        request.applymarker(pytest.mark.xfail(reason=f"not declared: {reason}", strict=False))
    if case.damages and not _can_tamper(owner, lab):
        pytest.skip("untested: no way to damage a page of this driver below the API; override tamper() and can_tamper()")


def _not_promised(name: str, lab: Lab, case: Case) -> str:
    """Why the interface of a foreign driver does not promise what a case is about; empty where it does."""
    if lab.dialect.promises is None:
        return ""
    try:
        return lab.dialect.promises.undeclared(lab.driver, name, case.rules, [str(level) for level in case.levels])
    except LookupError as error:
        pytest.skip(f"untested: {error}")


def _missing(owner: DriverTarget, lab: Lab, needs: Sequence[str]) -> list[str]:
    """What a case needs and the driver does not declare; evicting is asked of an instance whose capacity is limited."""
    promised, option = lab.capabilities, registry().get(lab.driver).capacity_option
    if option and "evicts" in needs:
        promised = replace(promised, evicts=instance_capabilities(lab.driver, lab.capped(AMPLE_BYTES)).evicts)
    missing = undeclared(promised, [need for need in needs if need not in (CAPACITY, STEPS, DIRECTORY)])
    if DIRECTORY in needs and not _is_a_directory(owner):
        missing.append(DIRECTORY)
    if CAPACITY in needs and not option:
        missing.append(CAPACITY)
    if STEPS in needs and option and not _has_steps(lab):
        missing.append("the steps of an ObjectStorage (a limited capacity is tried instead)")
    return missing


def _is_a_directory(owner: DriverTarget) -> bool:
    options = {**registry().get(owner.driver).trial_config, **owner.config}.values()
    return mentions_tmp(options) and not port_names(options) and not commands_of(owner.driver, owner.config, owner.services)


def _has_steps(lab: Lab) -> bool:
    storage = lab.bare()
    try:
        return can_tamper(storage)
    finally:
        storage.close()


def _can_tamper(owner: DriverTarget, lab: Lab) -> bool:
    storage = lab.bare()
    try:
        return owner.can_tamper(storage)
    finally:
        storage.close()


def _sandbox(request: pytest.FixtureRequest, owner: type) -> Path:
    """A directory for each class, so that all its storages share one store."""
    homes = request.config.stash.setdefault(_HOMES, {})
    name = _name(owner)
    if name not in homes:
        factory: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
        homes[name] = factory.mktemp("hicache")
        _inner(homes[name]).mkdir(parents=True)
    return homes[name]


def _name(owner: type) -> str:
    return f"{owner.__module__}.{owner.__qualname__}"


def _inner(sandbox: Path) -> Path:
    # Deep down, so that a key that climbs some directories up stays within sight.
    return sandbox / "four" / "levels" / "down" / "here"


def _profile(settings: Settings) -> Profile:
    profile = PROFILES[settings.profile]
    return replace(profile, shrinks=True) if settings.shrinks else profile


def _tell(request: pytest.FixtureRequest, owner: DriverTarget, capabilities: Capabilities, options: Mapping[str, object]) -> None:
    services = owner.services
    record: dict[str, Any] = {
        "driver": owner.driver,
        "capabilities": asdict(capabilities),
        "options": redacted(options),
        "services": services and [command if isinstance(command, str) else shlex.join(command) for command in services],
    }
    request.node.user_properties.append((LAB_PROPERTY, json.dumps(record)))
