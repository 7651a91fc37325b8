"""An HTTP server on loopback that says what a test wants."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Request = tuple[str, str, str]
"""Method, path, Authorization."""


@contextmanager
def serving(says: Callable[[str, str, str], tuple[int, str]]) -> Iterator[tuple[str, list[Request]]]:
    """A server's URI, and the requests that it has had; `says` answers each with a status and a text."""
    asked: list[Request] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            request = (self.command, self.path, self.headers.get("Authorization", ""))
            asked.append(request)
            status, text = says(*request)
            with suppress(BrokenPipeError):  # nobody waited for it
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", text + self.path)
                if status == 503:
                    self.send_header("Retry-After", "3600")
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
