"""Program of a segment owner: `mooncake_owner.py MASTER BYTES [OFFLOAD_DIRECTORY]`."""

import os
import signal
import sys

from mooncake.store import MooncakeDistributedStore

HOST = "127.0.0.1"
LOCAL_BUFFER_BYTES = 16 << 20


def own_segment(master: str, nbytes: int, offload: str = "") -> None:
    """Hold a segment until stdin ends."""
    store = MooncakeDistributedStore()
    where = (HOST, "P2PHANDSHAKE", nbytes, LOCAL_BUFFER_BYTES, "tcp", "", master)
    if offload:
        code = store.setup(*where, enable_ssd_offload=True, ssd_offload_path=offload)
    else:
        code = store.setup(*where)
    if code:
        sys.exit(f"setup: {code}")
    print("set up", flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)  # close() would take seconds, and the data is not needed


if __name__ == "__main__":
    own_segment(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
