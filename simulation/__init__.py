"""Whole overlays in virtual time: the real brokers and clients, a seeded network, a model of ZooKeeper."""

from simulation.run import Outcome, simulate

__all__ = ["Outcome", "simulate"]
