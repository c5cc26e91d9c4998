"""Drills: faults injected into a testbed under load, with a verdict on every promise."""
