"""What executes a plan's copies, one file per way, and the choice between them."""

from resharding.transport.choose import TRANSPORTS, execute
from resharding.transport.in_place import MoveReport

__all__ = ["MoveReport", "TRANSPORTS", "execute"]
