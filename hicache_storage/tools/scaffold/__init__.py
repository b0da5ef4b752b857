"""A new driver's package, made of templates."""

from hicache_storage.tools.scaffold.package import (
    STORES,
    PackageNames,
    check_name,
    make_package,
    package_files,
)

__all__ = ["STORES", "PackageNames", "check_name", "make_package", "package_files"]
