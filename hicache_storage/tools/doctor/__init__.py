"""Finds out why a driver does not work, or will not: what `hicache doctor` prints."""

from hicache_storage.tools.doctor.finding import Finding, Patient, Status
from hicache_storage.tools.doctor.watch import examine

__all__ = ["Finding", "Patient", "Status", "examine"]
