"""Keeps one core busy until it is ended: what brokers share a machine with.

python -m benchmarks.burn
"""

import hashlib

if __name__ == "__main__":
    data = bytes(4096)
    while True:
        data = hashlib.sha256(data).digest() * 128
