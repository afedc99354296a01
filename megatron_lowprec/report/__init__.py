"""Evaluates run folders: curves, differences with their uncertainty, and verdicts on papers' claims."""
