"""What an emulated WAN is made of."""

import enum


class WanKind(enum.StrEnum):
    """Who delays and loses packets."""

    AUTO = "auto"
    """`tc netem` where the kernel has it, the ferry elsewhere; between containers always the ferry."""
    NETEM = "netem"
    """The kernel, `topology.netem_wan`."""
    FERRY = "ferry"
    """A process of ours, `topology.ferry`."""
