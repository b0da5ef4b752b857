"""moto's server of the S3 protocol on a port of 127.0.0.1, with one empty bucket, `pages`."""

from __future__ import annotations

import sys

import waitress  # type: ignore[import-untyped]
from moto.moto_server.werkzeug_app import create_backend_app


def main(port: int) -> None:
    """Serve until the process is killed."""
    app = create_backend_app("s3")
    # Before the port is open, so that a client finds the bucket as soon as it finds the server.
    app.test_client().put("/pages", base_url=f"http://127.0.0.1:{port}")
    # moto's own way to serve closes each connection after one request.
    waitress.serve(app, host="127.0.0.1", port=port, connection_limit=2000, _quiet=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
