"""Hostile bytes for everything that reads bytes of others."""
