"""A local server that speaks S3 (moto's), in this process, with a bucket in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import obstore
from moto.server import ThreadedMotoServer

BUCKET = "astraflow-tests"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextmanager
def local_s3() -> Iterator[str]:
    """Its URL; while it lasts, the environment leads every S3 client there."""
    with mock.patch.dict(os.environ, ENVIRONMENT):
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        try:
            host, port = server.get_host_and_port()
            url = f"http://{host}:{port}"
            with mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"}):
                make_bucket(url)
                yield url
        finally:
            server.stop()


def make_bucket(url: str) -> None:
    import boto3  # comes with moto

    client: Any = boto3.client("s3", endpoint_url=url, region_name="us-east-1")
    client.create_bucket(Bucket=BUCKET)


def bucket(endpoint: str) -> Any:
    """The bucket by way of another address: a proxy, for example."""
    return obstore.store.S3Store(
        BUCKET,
        endpoint=endpoint,
        region="us-east-1",
        access_key_id="test",
        secret_access_key="test",
        client_options={"allow_http": True, "read_timeout": "2s", "connect_timeout": "1s"},
        retry_config={"max_retries": 0},
    )
