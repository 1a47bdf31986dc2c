"""A small S3 on loopback, as much of it as pyarrow's file system speaks: objects, ranges, listings, multipart uploads.

Nothing is checked about who asks. ``Buckets.requests`` counts by method; ``deny`` makes a method fail as a bucket does
that may not be written.
"""

from __future__ import annotations

import hashlib
import io
import re
import threading
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from xml.sax.saxutils import escape, unescape

_DATE = "Sat, 01 Aug 2026 00:00:00 GMT"


class Buckets:
    """``objects["bucket/name"]`` is an object's bytes."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.requests: Counter[str] = Counter()
        self.deny: set[str] = set()
        self.lock = threading.Lock()
        self.port = 0

    def uri(self, place: str) -> str:
        """``s3://`` URI of a bucket, or of something in it."""
        query = f"endpoint_override=127.0.0.1:{self.port}&scheme=http&region=us-east-1"
        return f"s3://key:secret@{place}?{query}"


@contextmanager
def running_s3() -> Iterator[Buckets]:
    """A server for the body."""
    buckets = Buckets()
    handler = type("Handler", (_Handler,), {"buckets": buckets})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    buckets.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield buckets
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    buckets: Buckets

    def log_message(self, *_: Any) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    @property
    def place(self) -> str:
        return urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).lstrip("/")

    @property
    def query(self) -> dict[str, str]:
        return dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query, keep_blank_values=True))

    def _is_denied(self) -> bool:
        with self.buckets.lock:
            self.buckets.requests[self.command] += 1
            denied = self.command in self.buckets.deny
        if denied:
            self._body()
            self._error(403, "AccessDenied")
        return denied

    def _answer(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None, size: int = -1) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(size if size >= 0 else len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _error(self, status: int, code: str) -> None:
        text = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'
        self._answer(status, text.encode(), {"Content-Type": "application/xml"})

    def _xml(self, text: str) -> None:
        self._answer(200, f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode(), {"Content-Type": "application/xml"})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = _unchunked(self.rfile)
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        # What signs or sums while it sends puts chunks of its own inside.
        return _unchunked(io.BytesIO(data)) if "aws-chunked" in (self.headers.get("Content-Encoding") or "") else data

    def do_HEAD(self) -> None:
        if self._is_denied():
            return
        with self.buckets.lock:
            data = self.buckets.objects.get(self.place)
            is_bucket = "/" not in self.place and any(
                name.startswith(f"{self.place}/") for name in self.buckets.objects
            )
        if data is None:
            self._answer(200 if is_bucket else 404)
        else:
            self._answer(200, b"", _headers(data), len(data))

    def do_GET(self) -> None:
        if self._is_denied():
            return
        if "list-type" in self.query:
            self._list()
            return
        with self.buckets.lock:
            data = self.buckets.objects.get(self.place)
        if data is None:
            self._error(404, "NoSuchKey")
            return
        span = self.headers.get("Range")
        if span is None:
            self._answer(200, data, _headers(data))
            return
        first, last = span.removeprefix("bytes=").split("-")
        part = data[int(first) : int(last) + 1 if last else None]
        shown = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
        self._answer(206, part, _headers(data) | {"Content-Range": shown})

    def _list(self) -> None:
        bucket, query = self.place.split("/")[0], self.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        with self.buckets.lock:
            names = sorted(name for name in self.buckets.objects if name.startswith(f"{bucket}/"))
            sizes = {name: len(data) for name, data in self.buckets.objects.items()}
        rows, common = [], set()
        for name in names:
            key = name.removeprefix(f"{bucket}/")
            if not key.startswith(prefix):
                continue
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if found:
                common.add(prefix + head + delimiter)
            else:
                rows.append(
                    f"<Contents><Key>{escape(key)}</Key><LastModified>2026-08-01T00:00:00.000Z</LastModified>"
                    f"<ETag>&quot;0&quot;</ETag><Size>{sizes[name]}</Size><StorageClass>STANDARD</StorageClass></Contents>"
                )
        rows += [f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(common)]
        self._xml(
            f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>{bucket}</Name>'
            f"<Prefix>{escape(prefix)}</Prefix><KeyCount>{len(rows)}</KeyCount><MaxKeys>1000</MaxKeys>"
            f"<IsTruncated>false</IsTruncated>{''.join(rows)}</ListBucketResult>"
        )

    def do_PUT(self) -> None:
        if self._is_denied():
            return
        data, query = self._body(), self.query
        with self.buckets.lock:
            if "uploadId" in query:
                self.buckets.uploads[query["uploadId"]][int(query["partNumber"])] = data
            else:
                self.buckets.objects[self.place] = data
        self._answer(200, b"", {"ETag": _headers(data)["ETag"]})

    def do_POST(self) -> None:
        if self._is_denied():
            return
        data, query, (bucket, _, key) = self._body(), self.query, self.place.partition("/")
        with self.buckets.lock:
            if "delete" in query:
                for name in re.findall(r"<Key>(.*?)</Key>", data.decode()):
                    self.buckets.objects.pop(f"{bucket}/{unescape(name)}", None)
                name, rest = "DeleteResult", ""
            elif "uploads" in query:
                upload = f"upload-{len(self.buckets.uploads)}"
                self.buckets.uploads[upload] = {}
                name, rest = "InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>"
            else:
                parts = self.buckets.uploads[query["uploadId"]]
                self.buckets.objects[self.place] = b"".join(parts[number] for number in sorted(parts))
                name, rest = "CompleteMultipartUploadResult", "<ETag>&quot;0&quot;</ETag>"
        self._xml(
            f'<{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Bucket>{bucket}</Bucket>'
            f"<Key>{escape(key)}</Key>{rest}</{name}>"
        )

    def do_DELETE(self) -> None:
        if self._is_denied():
            return
        with self.buckets.lock:
            self.buckets.objects.pop(self.place, None)
            self.buckets.uploads.pop(self.query.get("uploadId", ""), None)
        self._answer(204)


def _unchunked(file: io.BufferedIOBase) -> bytes:
    found = b""
    while size := int(file.readline().split(b";")[0], 16):
        found += file.read(size)
        file.readline()
    while file.readline().strip():
        pass
    return found


def _headers(data: bytes) -> dict[str, str]:
    return {
        "ETag": f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"',
        "Last-Modified": _DATE,
        "Content-Type": "application/octet-stream",
        "Accept-Ranges": "bytes",
    }
