"""Slot files: checks, geometry, and the engines that read and write slots."""
