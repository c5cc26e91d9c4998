"""Every limit and period of the control plane, by name. Related ones are asserted together at the end."""

from typing import Final

# Session
SESSION_TIMEOUT_S: Final = 4.0
"""What is asked of the server; the server has the last word (2 to 20 ticks)."""
LEASE_SHARE: Final = 0.8
"""A lease ends after this share of the session timeout, so that we stop before others take over."""
LEASE_RENEWALS_PER_TIMEOUT: Final = 10
"""How often within a session timeout an idle session renews its lease."""
REQUESTS_IN_FLIGHT_MAX: Final = 100
"""kazoo wakes its thread with one byte per request through a socket pair that takes some 278 such bytes
before it blocks the caller, which here is the event loop. Bytes of one broken connection may be left over."""
NODE_MAX_BYTES: Final = 1_000_000
"""ZooKeeper refuses packets above 1 MiB minus one byte, path and header included."""
STATE_DELAY_S: Final = 0.05
"""How long the news of a broken connection may lag behind the requests that it broke."""
CLOSE_GRACE_S: Final = 1.0
"""How long a closing session waits for the server's farewell before it cuts the connection."""
OPERATION_TIMEOUT_S: Final = 30.0
"""How long one call of the coordinator keeps trying before it gives up."""

# Mirrors
COALESCE_S: Final = 0.015
"""Hints that arrive within this time are answered by one read."""
COALESCE_MAX_S: Final = 1.0
"""Folders that take long to read are read less often, but at least this often."""
READS_PER_S: Final = 400.0
"""Pace at which the mirrors of one coordinator read when very many are hinted at once."""
RESYNC_S: Final = 15.0
"""A mirror reads again after about this long even without a hint."""
RESYNC_READS: Final = 30
"""Reads that all resyncs of a session may make in that time; with more to read, it gets longer."""

# Transactions
OPERATIONS_PER_TRANSACTION: Final = 100

# Leader
ROUND_INTERVAL_S: Final = 0.02
"""Shortest time between two rounds of the leader."""
SETTLE_S: Final = 1.0
"""How long a new backup stands before it may become the primary in a planned move, if it knows the topic
by then; else it is looked at again after as long."""
REVIEW_S: Final = 5.0
"""The leader looks at reported loads this often."""
ABSENCE_GRACE_S: Final = 2.0
"""After an election that finds several routers missing, how long they are given to come back."""
FOLDER_KEPT_S: Final = 60.0
"""The empty assignment folder of a router that is gone is removed after this long."""
MOVES_PER_ROUND: Final = 64
MOVES_PER_ROUND_SHARE: Final = 0.05
"""A round of rebalancing touches at most the larger of this number and this share of the topics."""
TOPICS_PER_STEP: Final = 1_000
"""Topics a leader looks at before it lets other work of its event loop go on: it also forwards messages,
and a thread for the plan would only fight with them for the interpreter."""
MOVES_PER_STEP: Final = 100
"""The same for changes it decides on, each of which compares all routers."""
READS_PER_WAVE: Final = 32
"""Topic records a leader asks for before it lets other work of its event loop go on."""
CHANGES_PER_WAVE: Final = 64
"""Changes that are encoded and sent before the leader lets other work of its event loop go on."""
REST_PER_WORK: Final = 2.0
"""After such a wave the leader rests this many times as long as it took, where nothing is urgent: topics
that are served can wait, messages cannot."""
SCRUB_TOPICS: Final = 256
"""Topic records a leader reads again with each resync, in turn."""
CATCH_UP_POLL_S: Final = 0.02
"""How often it is looked whether all mirrors have read again."""

TOPIC_ID_MAX: Final = 2**31 - 1

assert 0 < LEASE_SHARE < 1 < LEASE_RENEWALS_PER_TIMEOUT
assert 2 * REQUESTS_IN_FLIGHT_MAX < 278
assert COALESCE_S < COALESCE_MAX_S < RESYNC_S
assert ROUND_INTERVAL_S < SETTLE_S < REVIEW_S
