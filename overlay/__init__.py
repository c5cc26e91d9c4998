"""What every node shares, pure: messages, codec, QoS, dedupe, retention, outboxes, limits.

Nothing here opens a socket, reads a clock or draws a random number. Time is an argument.
"""
