"""Runs that would decide what the runs at hand leave open."""
