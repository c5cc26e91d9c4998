"""The testbed: a topology as YAML, drivers that run it, its WAN, load, faults and verdicts."""
