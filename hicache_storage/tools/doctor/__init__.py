"""Diagnosis of drivers and their environment, as `hicache doctor` prints it."""

from hicache_storage.tools.doctor.finding import DoctorTarget, Finding, Role, Status

__all__ = ["DoctorTarget", "Finding", "Role", "Status"]
