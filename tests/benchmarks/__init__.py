"""Tests of the benchmarks: small runs, so that they cannot rot."""
