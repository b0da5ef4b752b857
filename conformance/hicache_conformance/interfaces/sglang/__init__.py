"""Drivers with SGLang's storage interface."""
