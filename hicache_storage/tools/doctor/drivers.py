"""Static checks of drivers: plugins that are broken or share a name, and declarations against
implementation. Nothing is opened."""

from __future__ import annotations

import os
import re
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, distribution, version
from typing import TYPE_CHECKING, Final

from packaging.requirements import InvalidRequirement, Requirement

from hicache_storage.objects import ObjectStorage
from hicache_storage.plugins import (
    DISABLED_PLUGINS_VARIABLE,
    config_model,
    driver_class,
    registry,
)
from hicache_storage.spec import (
    Capabilities,
    DriverError,
    Durability,
    HiCacheStorage,
    Sharing,
    parse_config,
)
from hicache_storage.tools.doctor.finding import Finding, Status, fail, ok, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_storage.hookspecs import DriverSpec
    from hicache_storage.spec import DriverConfig
    from hicache_storage.tools.doctor.finding import DoctorTarget

SDK: Final = "hicache-storage"

OPTIONAL: Final = {
    ObjectStorage: {"deletes": "delete_objects", "clears": "clear_namespaces"},
    HiCacheStorage: {"deletes": "delete", "clears": "clear"},
}
"""Methods that declared capabilities require, by base class."""


def check_plugins(target: DoctorTarget) -> Iterator[Finding]:
    """Check that every entry point of the group loads, and that no two register one name."""
    found = registry()
    yield ok(
        "plugins",
        f"drivers {', '.join(sorted(set(found.drivers) - set(found.conflicts))) or 'none'}",
    )
    for plugin in found.broken:
        distribution, _, name = plugin.owner.partition(":")
        # A broken plugin of another driver does not affect the target.
        status = Status.FAIL if target.driver in (None, name) else Status.WARN
        fix = f"reinstall {distribution}, or pip uninstall {distribution}, or hide it: {DISABLED_PLUGINS_VARIABLE}={name}"
        yield Finding(
            "plugins",
            status,
            f"{plugin.owner} is broken: {type(plugin.error).__name__}: {plugin.error}",
            fix,
        )
    for driver, owners in found.conflicts.items():
        status = Status.FAIL if target.driver in (None, driver) else Status.WARN
        distributions = sorted({owner.partition(":")[0] for owner in owners})
        fix = f"pip uninstall all but one of {', '.join(distributions)}"
        yield Finding(
            "plugins", status, f"driver {driver!r} is registered by {' and '.join(owners)}", fix
        )
    disabled = os.environ.get(DISABLED_PLUGINS_VARIABLE)
    if disabled:
        yield warn(
            "plugins",
            f"{DISABLED_PLUGINS_VARIABLE} hides {disabled}",
            f"unset {DISABLED_PLUGINS_VARIABLE}",
        )


def check_registered(target: DoctorTarget) -> Iterator[Finding]:
    """Check that a plugin registers the target."""
    found = registry()
    if target.driver is None or target.driver in found.conflicts:
        return
    if target.driver not in found.drivers:
        installed = ", ".join(sorted(found.drivers)) or "none"
        yield fail(
            target.driver,
            f"no plugin registers it; installed: {installed}",
            "pip install the package that brings it",
        )
    else:
        spec = found.drivers[target.driver]
        yield ok(target.driver, f"{spec.summary or 'no summary'} ({found.owners[target.driver]})")


def check_drivers(target: DoctorTarget) -> Iterator[Finding]:
    """Import the target, or all drivers, and check them."""
    found = registry()
    for name in sorted(found.drivers):
        if name not in found.conflicts and target.driver in (None, name):
            spec = found.drivers[name]
            yield from check_requirement(name, found.owners[name].partition(":")[0])
            yield from check_class(spec, named=target.driver is not None)
            yield from check_config(spec, named=target.driver is not None)


def check_requirement(name: str, owner: str) -> Iterator[Finding]:
    """Check that the distribution requires a version of the SDK that is installed."""
    check, installed = f"{name}: contract", version(SDK)
    if owner == SDK:
        yield ok(check, f"HiCacheStorage v2, part of {SDK} {installed}")
        return
    try:
        package = distribution(owner)
    except PackageNotFoundError:
        yield warn(check, f"{owner} has no metadata", f"reinstall {owner}")
        return
    asked = [
        requirement
        for text in package.requires or ()
        if (requirement := _requirement(text)) and requirement.name == SDK
    ]
    if not asked:
        fix = f'dependencies = ["{SDK}>={installed.rpartition(".")[0] or installed}"] in its pyproject.toml'
        yield warn(check, f"{owner} {package.version} does not say which {SDK} it needs", fix)
    elif not all(
        # A pre-release of the SDK counts as installed; by default no range contains one.
        requirement.specifier.contains(installed, prereleases=True)
        for requirement in asked
    ):
        wanted = ", ".join(str(requirement.specifier) for requirement in asked)
        yield fail(
            check,
            f"{owner} {package.version} needs {SDK}{wanted}; {installed} is installed",
            f"pip install '{SDK}{wanted}'",
        )
    else:
        yield ok(check, f"HiCacheStorage v2; {owner} {package.version} fits {SDK} {installed}")


def check_class(spec: DriverSpec, *, named: bool) -> Iterator[Finding]:
    """Check that the class can be imported, is complete, and implements what it declares."""
    check = f"{spec.name}: class"
    try:
        driver = driver_class(spec)
    except DriverError as error:
        yield _unavailable(check, spec, error, named=named)
        return
    if missing := sorted(driver.__abstractmethods__):
        detail = f"{driver.__name__} does not implement {', '.join(missing)}"
        yield fail(check, detail, "implement them")
    else:
        yield ok(check, spec.target)
    yield from check_capabilities(spec.name, spec.capabilities, driver)


def check_capabilities(
    name: str, declared: Capabilities, driver: type[HiCacheStorage]
) -> Iterator[Finding]:
    """Check declared capabilities against implemented methods, and against each other."""
    check, wrong = f"{name}: capabilities", list[Finding]()
    base = _base(driver)
    for capability, method in OPTIONAL[base].items():
        implemented = getattr(driver, method) is not getattr(base, method)
        if getattr(declared, capability) and not implemented:
            wrong.append(
                fail(
                    check,
                    f"declares {capability!r} without {method}()",
                    f"implement {method}(), or do not declare {capability!r}",
                )
            )
        if implemented and not getattr(declared, capability):
            wrong.append(
                warn(
                    check,
                    f"implements {method}() and does not declare {capability!r}: calls of it raise",
                    f"{capability}=True",
                )
            )
    if declared.networked and not declared.may_hang:
        detail = "declares networked and may_hang=False: a silent server stops the engine, because no deadline is kept for it"
        wrong.append(fail(check, detail, "leave may_hang out"))
    if declared.sharing is Sharing.NONE and declared.durability is not Durability.NONE:
        detail = f"declares durability={declared.durability} and sharing=none: a storage that is opened again is another one"
        wrong.append(warn(check, detail, f"sharing={Sharing.PROCESS!r}, at least"))
    yield from wrong or [ok(check, ", ".join(_declared(declared)) or "none declared")]


def check_config(spec: DriverSpec, *, named: bool) -> Iterator[Finding]:
    """Check that the model of options can be imported, is documented, and fits the `DriverSpec`."""
    check = f"{spec.name}: options"
    try:
        model = config_model(spec)
    except DriverError as error:
        yield _unavailable(check, spec, error, named=named)
        return
    wrong = list(_option_flaws(check, spec, model))
    yield from wrong or [ok(check, ", ".join(model.__struct_fields__) or "none")]


def _option_flaws(check: str, spec: DriverSpec, model: type[DriverConfig]) -> Iterator[Finding]:
    import msgspec

    info = msgspec.inspect.type_info(model)
    assert isinstance(info, msgspec.inspect.StructType)
    undocumented = [
        field.encode_name
        for field in info.fields
        if not (getattr(field.type, "extra_json_schema", None) or {}).get("description")
    ]
    if undocumented:
        fix = 'Annotated[..., msgspec.Meta(description="...")]'
        yield warn(
            check,
            f"{', '.join(undocumented)}: `hicache drivers {spec.name}` has nothing to say about it",
            fix,
        )
    if not model.__struct_config__.forbid_unknown_fields:
        yield warn(
            check,
            "misspelt options are ignored",
            "leave forbid_unknown_fields as DriverConfig sets it",
        )
    if spec.capacity_option and spec.capacity_option not in model.__struct_fields__:
        yield fail(
            check,
            f"capacity_option names {spec.capacity_option!r}, which is no option",
            "correct the DriverSpec",
        )
    if spec.capabilities.evicts and not spec.capacity_option:
        fix = "capacity_option=... in the DriverSpec"
        yield warn(
            check,
            "declares evicts and names no capacity option: the suite cannot fill the store",
            fix,
        )
    try:
        parse_config(
            model,
            {
                # Any port will do: nothing is opened here.
                name: re.sub(r"\{port:\w+\}", "1", value)
                for name, value in spec.trial_config.items()
            },
        )
    except DriverError as error:
        fix = "give each option without a default a value in trial_config of the DriverSpec"
        yield warn(check, f"no throwaway store can be made of trial_config: {error}", fix)


def _unavailable(check: str, spec: DriverSpec, error: DriverError, *, named: bool) -> Finding:
    fix = (
        f"pip install {' '.join(spec.requires)}"
        if spec.requires
        else f"see `python -c 'import {spec.target.partition(':')[0]}'`"
    )
    # A driver that is not the target may lack its packages, because it is not used.
    return Finding(check, Status.FAIL if named else Status.WARN, str(error), fix)


def _base(driver: type[HiCacheStorage]) -> type[HiCacheStorage]:
    return ObjectStorage if issubclass(driver, ObjectStorage) else HiCacheStorage


def _declared(capabilities: Capabilities) -> list[str]:
    return [
        field.name
        if getattr(capabilities, field.name) is True
        else f"{field.name}={getattr(capabilities, field.name)}"
        for field in fields(Capabilities)
        if getattr(capabilities, field.name) not in (False, None)
        and field.name not in ("may_hang", "max_key_bytes")
    ]


def _requirement(text: str) -> Requirement | None:
    try:
        return Requirement(text)
    except InvalidRequirement:
        return None
