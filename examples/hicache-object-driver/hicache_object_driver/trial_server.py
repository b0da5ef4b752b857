"""moto's server of the S3 protocol on a port of 127.0.0.1, with one empty bucket, `pages`."""

from __future__ import annotations

import sys
import threading
import urllib.request


def main(port: int) -> None:
    """Serve until the process is killed."""
    from moto.server import ThreadedMotoServer

    # The bucket first: whoever finds the port open finds it too.
    server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    server.start()
    bucket = urllib.request.Request(f"http://127.0.0.1:{port}/pages", method="PUT")
    urllib.request.urlopen(bucket).close()
    threading.Event().wait()


if __name__ == "__main__":
    main(int(sys.argv[1]))
