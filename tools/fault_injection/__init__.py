"""Kills, signals, full disks and damaged files during a small run: ``python -m tools.fault_injection``."""
