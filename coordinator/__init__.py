"""The control plane: ZooKeeper session and lease, znode tree, election, assignment, embedded server."""

from coordinator.assignment import Change, Placement, Reason, check_placements, plan
from coordinator.client import MakeClient
from coordinator.coordinator import Coordinator, CoordinatorStatistics
from coordinator.election import Candidacy
from coordinator.embedded import EmbeddedZooKeeper
from coordinator.errors import (
    BadVersionError,
    ClusterFormatError,
    ConnectionLostError,
    CoordinationError,
    CoordinationTimeoutError,
    DuplicateBrokerError,
    FencedError,
    FourLetterError,
    JavaNotFoundError,
    NodeExistsError,
    NodeTooLargeError,
    NoNodeError,
    NotAllowedError,
    NotEmptyError,
    RecordError,
    SessionClosedError,
    TopicExistsError,
    TopicInUseError,
    TransactionFailedError,
    UnknownPolicyError,
    UnknownTopicError,
    ZooKeeperStartError,
)
from coordinator.kazoo_client import ZooKeeperClient
from coordinator.mirror import Watch
from coordinator.partners import Partners
from coordinator.policy import FewestTopics, LoadPolicy, MessageRate, policy_by_name
from coordinator.records import (
    EdgeRecord,
    Endpoint,
    FlagRecord,
    RouterRecord,
    TopicRecord,
    TopicView,
    requests_of,
)
from coordinator.registration import Registration
from coordinator.security import ZooKeeperSecurity, client_of
from coordinator.session import Session, SessionState, SessionStatistics
from overlay.messages import EndpointKind

__all__ = [
    "BadVersionError",
    "Candidacy",
    "Change",
    "ClusterFormatError",
    "ConnectionLostError",
    "CoordinationError",
    "CoordinationTimeoutError",
    "Coordinator",
    "CoordinatorStatistics",
    "DuplicateBrokerError",
    "EdgeRecord",
    "EmbeddedZooKeeper",
    "Endpoint",
    "EndpointKind",
    "FencedError",
    "FewestTopics",
    "FlagRecord",
    "FourLetterError",
    "JavaNotFoundError",
    "LoadPolicy",
    "MakeClient",
    "MessageRate",
    "NoNodeError",
    "NodeExistsError",
    "NodeTooLargeError",
    "NotAllowedError",
    "NotEmptyError",
    "Partners",
    "Placement",
    "Reason",
    "RecordError",
    "Registration",
    "RouterRecord",
    "Session",
    "SessionClosedError",
    "SessionState",
    "SessionStatistics",
    "TopicExistsError",
    "TopicInUseError",
    "TopicRecord",
    "TopicView",
    "TransactionFailedError",
    "UnknownPolicyError",
    "UnknownTopicError",
    "Watch",
    "ZooKeeperClient",
    "ZooKeeperSecurity",
    "ZooKeeperStartError",
    "check_placements",
    "client_of",
    "plan",
    "policy_by_name",
    "requests_of",
]
