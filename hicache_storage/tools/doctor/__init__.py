"""Diagnosis of drivers and their environment, as `hicache doctor` prints it."""

from hicache_storage.tools.doctor.finding import DoctorTarget, Finding, Role, Status
from hicache_storage.tools.doctor.supervisor import examine

__all__ = ["DoctorTarget", "Finding", "Role", "Status", "examine"]
