"""Every limit of the overlay, by name. Related limits are asserted together at the end.

A limit that a peer can run into is named in the error the peer gets.
"""

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

MILLISECOND_NS: Final = 1_000_000
SECOND_NS: Final = 1_000_000_000

# Frames
FRAME_MAX_BYTES: Final = 1 * MIB
"""Largest frame after the handshake, kind byte included, length field not."""
HANDSHAKE_FRAME_MAX_BYTES: Final = 4 * KIB
"""Largest frame before the peer has introduced itself."""
TLS_HANDSHAKE_MAX_BYTES: Final = 16 * KIB
"""What a peer may send before TLS is established; certificates of our kind need a tenth."""
FRAME_TARGET_BYTES: Final = 64 * KIB
"""A sender closes a data frame once it holds this much, so that no frame blocks a link for long."""
PAYLOAD_MAX_BYTES: Final = 512 * KIB
"""Largest payload of one message."""

# Handshake and liveness
HANDSHAKE_TIMEOUT_NS: Final = 2 * SECOND_NS
HEARTBEAT_INTERVAL_NS: Final = 10 * MILLISECOND_NS
HEARTBEAT_INTERVAL_MAX_NS: Final = 10 * SECOND_NS
"""Slowest heartbeat a peer may ask for: it decides how long its death goes unnoticed."""
HEARTBEAT_SILENCE_NS: Final = 50 * MILLISECOND_NS
"""Silence after which a peer in the same LAN counts as dead; a WAN link adds its round trip."""
HEARTBEAT_FROZEN_NS: Final = 500 * MILLISECOND_NS
"""Silence after which a peer counts as dead although its host acknowledges what it is sent."""
HEARTBEAT_UNKNOWN_NS: Final = SECOND_NS
"""Silence that any peer may keep while its round trip is not known: by satellite that takes 0.6 s."""
HEARTBEAT_SILENCE_INTERVALS: Final = 4
"""A WAN peer may be silent for two round trips and this many heartbeat intervals."""
LIVELINESS_NS: Final = 2 * SECOND_NS
"""How long a client may be away before its endpoints are taken down."""
LIVELINESS_MAX_NS: Final = 3_600 * SECOND_NS
PERIOD_MAX_NS: Final = 366 * 86_400 * SECOND_NS
"""Longest period and deadline of a topic."""

# Clocks
WIRE_NUMBER_BITS: Final = 61
"""Sequences, times and clock shifts on the wire stay below 2^61 (73 years in ns): compiled nodes add a few
of them in 64 bits."""
DRIFT_PPM: Final = 100
"""Most a clock is assumed to drift against real time, unless configured."""
DRIFT_MAX_PPM: Final = 10_000
"""Most that can be configured: a clock that is worse than a per cent is broken."""

# Links
OUTBOX_MAX_BYTES: Final = 32 * MIB
"""Memory that waiting and unacknowledged messages for one peer may take; beyond it those due first are
dropped and counted."""
RUN_OVERHEAD_BYTES: Final = 256
"""Memory that a waiting run takes besides its bytes: with small messages far more than those."""
SUBSCRIBER_PENDING_BYTES: Final = 16 * MIB
"""The same for one client of an edge, unless configured."""
OUTBOX_SOFT_BYTES: Final = 8 * MIB
"""Above this a publisher is told to wait."""
WRITE_HIGH_WATER_BYTES: Final = 64 * KIB
"""Bytes handed to a socket before we wait for it to drain; the rest stays in our queue."""
UNREAD_MAX_BYTES: Final = 64 * MIB
"""Bytes written that a peer does not read before its connection is given up. No window holds back control
frames and heartbeats; what is written again on a new connection must fit."""
ACKNOWLEDGE_EVERY_BYTES: Final = 256 * KIB
"""A receiver acknowledges at least this often, besides every heartbeat."""

# What has been read and waits to be processed
READ_AT_ONCE_BYTES: Final = 16 * KIB
"""What a node processes where it reads it, if nothing else waits."""
INBOX_TURN_NS: Final = 1 * MILLISECOND_NS
"""How long waiting frames are processed before all sockets are read again."""
INBOX_CLIENT_BYTES: Final = 64 * KIB
"""Of one client; with more its socket is not read, so that clients of the same urgency take turns."""
INBOX_BROKER_BYTES: Final = 16 * MIB
"""Of one broker, whose window is smaller."""

# Datagrams beside a link
DATAGRAM_MAX_BYTES: Final = 1_200
"""Frames that make a larger datagram go by TCP: this much fits every usual path unfragmented."""
DATAGRAM_FRAME_BYTES: Final = 1_180
"""A sender closes an urgent frame at this size, so that it fits with its number."""
URGENT_NS: Final = 1 * SECOND_NS
"""Messages with longer deadlines never travel as datagrams."""
FRAMES_AHEAD_MAX: Final = 65_536
"""Frames that may be ahead of a missing one before the receiver takes the sender for broken."""
UNACKNOWLEDGED_FRAMES_MAX: Final = 32_768
"""Frames sent behind one that the peer has not acknowledged; the window counts only what is missing."""
COPIES_MAX: Final = 4
"""Most copies of a datagram that are sent at once."""

# Brokers
ENDPOINT_ID_MAX: Final = 2**63 - 1
"""Ids of publishers and subscribers stay within 63 bits: hops read them as signed numbers."""
RETENTION_DEFAULT: Final = 64
RETENTION_MAX: Final = 65_536
UNSENT_MAX_MESSAGES: Final = 65_536
"""Messages of one publisher an edge keeps while no routing broker can be reached."""
RETAINED_MAX_BYTES: Final = 256 * MIB
"""Memory for what an edge keeps of all publishers, unless configured."""
RETAINED_MIN_BYTES: Final = 16 * MIB
UNROUTED_MAX_BYTES: Final = 8 * MIB
"""What a routing broker keeps for topics whose routes it is still reading."""
UNROUTED_MAX_NS: Final = 3 * SECOND_NS
BACKUP_MESSAGES_PER_TOPIC: Final = 10
"""Copies a backup keeps for one primary, times the topics it serves."""
BACKUP_MIN_BYTES: Final = 8 * MIB
"""Copies a backup keeps for one primary, however few topics it serves."""
ROUTE_LINGER_NS: Final = 2 * SECOND_NS
"""How long a route outlasts the registration of its last subscriber."""
RESUME_NS: Final = 2 * SECOND_NS
"""How long a subscriber that has come from another edge waits for what it has missed."""
PUBLISHERS_REMEMBERED_MAX: Final = 16_384
"""Publishers of a topic that a subscriber remembers, and as many again that it has heard of before those."""
RESUME_PUBLISHERS_MAX: Final = 4_096
"""Publishers of whose messages a subscriber resumes at another edge, the youngest; 72 KiB of a frame."""
MOVED_OVERLAP_NS: Final = 1 * SECOND_NS
"""How long a client that goes over to another edge listens to the old one after the new one serves it."""
ENDPOINTS_MAX_PER_CLIENT: Final = 16_384
DECLARATIONS_MAX_PER_CLIENT: Final = 16_384
"""Declarations of one client that are worked on at once: it may declare all its endpoints in one go."""
HELD_MAX_BYTES: Final = 32 * MIB
"""Memory of what waits at an egress edge for predecessors; beyond it that of a publisher goes at once."""
CONNECTIONS_MAX_PER_BROKER: Final = 12_000
CONNECTIONS_MAX_PER_ADDRESS: Final = 11_000
"""Connections from one address, unless configured: many clients may share the address of a NAT."""
CONNECTIONS_AT_A_TIME: Final = 16
"""Connections a broker takes in before it looks after messages again."""
CONNECTIONS_REST_NS: Final = 16 * MILLISECOND_NS
"""... and how long it takes in nobody after that many: a thousand a second."""
CONNECTIONS_MAX_WAITING: Final = 1_000
"""Connections that wait in the kernel to be taken in: a second's worth."""
HANDSHAKES_MAX_PER_ADDRESS: Final = 512
"""Connections of one address that have not introduced themselves yet; above it the oldest goes."""
EDGES_TOLD_MAX_BYTES: Final = 2 * KIB
"""Locators of other edges in a WELCOME, which must fit into a frame before the handshake is over."""
PUBLISHERS_TOLD_MAX: Final = 1_024
"""Publishers a watching subscriber is told of; with more of them it is not told who has left."""
CONTROL_NESTING_MAX: Final = 4
"""How deep lists and maps may be nested in a field of a control frame."""
MISSING_SEQUENCES_MAX: Final = 256
"""Gaps remembered per publisher, to tell a late message from a duplicate."""

# Names
NAME_MAX_CHARACTERS: Final = 64
TOPIC_MAX_BYTES: Final = 255

assert HANDSHAKE_FRAME_MAX_BYTES < FRAME_MAX_BYTES
assert EDGES_TOLD_MAX_BYTES <= HANDSHAKE_FRAME_MAX_BYTES // 2
assert DECLARATIONS_MAX_PER_CLIENT >= ENDPOINTS_MAX_PER_CLIENT
assert DATAGRAM_FRAME_BYTES + 16 <= DATAGRAM_MAX_BYTES < FRAME_TARGET_BYTES
assert UNACKNOWLEDGED_FRAMES_MAX < FRAMES_AHEAD_MAX
assert READ_AT_ONCE_BYTES < INBOX_CLIENT_BYTES < INBOX_BROKER_BYTES
assert INBOX_TURN_NS < HEARTBEAT_INTERVAL_NS
assert HANDSHAKE_FRAME_MAX_BYTES < TLS_HANDSHAKE_MAX_BYTES
assert CONNECTIONS_MAX_WAITING * CONNECTIONS_REST_NS < HANDSHAKE_TIMEOUT_NS * CONNECTIONS_AT_A_TIME
assert HANDSHAKES_MAX_PER_ADDRESS < CONNECTIONS_MAX_PER_ADDRESS < CONNECTIONS_MAX_PER_BROKER
assert PAYLOAD_MAX_BYTES + FRAME_TARGET_BYTES < FRAME_MAX_BYTES
assert FRAME_TARGET_BYTES <= ACKNOWLEDGE_EVERY_BYTES < OUTBOX_SOFT_BYTES < OUTBOX_MAX_BYTES
assert OUTBOX_SOFT_BYTES < SUBSCRIBER_PENDING_BYTES <= OUTBOX_MAX_BYTES < UNREAD_MAX_BYTES
assert UNACKNOWLEDGED_FRAMES_MAX * DATAGRAM_MAX_BYTES < UNREAD_MAX_BYTES
assert HEARTBEAT_INTERVAL_NS * HEARTBEAT_SILENCE_INTERVALS < HEARTBEAT_SILENCE_NS
assert HEARTBEAT_SILENCE_NS < HEARTBEAT_FROZEN_NS < HEARTBEAT_UNKNOWN_NS <= HANDSHAKE_TIMEOUT_NS
assert RESUME_PUBLISHERS_MAX * 18 < FRAME_MAX_BYTES
assert MOVED_OVERLAP_NS < RESUME_NS <= ROUTE_LINGER_NS
assert RETENTION_DEFAULT <= RETENTION_MAX <= UNSENT_MAX_MESSAGES
