"""Real containers on a real engine: `make compose-test` runs these."""
