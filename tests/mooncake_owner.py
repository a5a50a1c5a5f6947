"""Program of a segment owner: `mooncake_owner.py MASTER BYTES`."""

import os
import signal
import sys

from mooncake.store import MooncakeDistributedStore

HOST = "127.0.0.1"
LOCAL_BUFFER_BYTES = 16 << 20


def own_segment(master: str, nbytes: int) -> None:
    """Hold a segment until stdin ends."""
    store = MooncakeDistributedStore()
    code = store.setup(HOST, "P2PHANDSHAKE", nbytes, LOCAL_BUFFER_BYTES, "tcp", "", master)
    if code:
        sys.exit(f"setup: {code}")
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)  # close() would take seconds, and the data is not needed


if __name__ == "__main__":
    own_segment(sys.argv[1], int(sys.argv[2]))
