"""A real S3 endpoint on this machine: moto's server, with a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import boto3
from moto.server import ThreadedMotoServer

_REGION, _KEY, _SECRET = "us-east-1", "key", "secret"


class Bucket(NamedTuple):
    """``client`` is boto3's, for the test's own looks; ``endpoint`` is where it is served, HOST:PORT."""

    client: Any
    endpoint: str
    name: str = "bucket"

    def uri(self, path: str, bucket: str | None = None) -> str:
        """The place as indexd is given it."""
        query = f"region={_REGION}&scheme=http&endpoint_override={self.endpoint}"
        return f"s3://{_KEY}:{_SECRET}@{bucket or self.name}/{quote(path)}?{query}"

    def put(self, directory: Path, path: str) -> None:
        """Upload every file below a directory."""
        for file in sorted(found for found in directory.rglob("*") if found.is_file()):
            self.client.upload_file(str(file), self.name, f"{path}/{file.relative_to(directory)}")


@contextmanager
def running_s3() -> Iterator[Bucket]:
    """Until the end of the block."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url, keys = f"http://{host}:{port}", {"aws_access_key_id": _KEY, "aws_secret_access_key": _SECRET}
        bucket = Bucket(boto3.client("s3", endpoint_url=url, region_name=_REGION, **keys), f"{host}:{port}")
        bucket.client.create_bucket(Bucket=bucket.name)
        yield bucket
        bucket.client.close()
    finally:
        server.stop()
