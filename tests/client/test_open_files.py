"""Each request in flight has a connection, and a connection is an open file."""

import asyncio
import errno
import os
import subprocess
import sys
from typing import NoReturn

import pytest
from conftest import REPO

from quantmill.client import checks, client, stream
from quantmill.client.checks import LoadRequest
from quantmill.client.dialects import DIALECTS
from quantmill.client.schedule import Closed
from quantmill.client.target import Target
from quantmill.loads import result


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_the_clients_file_limit_is_not_the_servers_fault(number: int) -> None:
    async def connect(_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    target = Target("http://127.0.0.1:1")
    recording = asyncio.run(client.send(target, [target.request("/", {})] * 2, Closed(2), connect))
    replies = [stream.read(each, DIALECTS["completions"]) for each in recording.exchanges]
    (found,) = checks.check_replies(replies, [LoadRequest([1], 1)] * 2)
    assert found.refuses
    assert found.fault not in result.MISSES
    assert found.message.startswith("no connection: the client may open no more files for 2 of 2 requests; ")


def test_the_client_raises_its_file_limit() -> None:
    script = """
import resource
from quantmill.loads import worker as process
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(64, most), most))
process.raise_file_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
"""
    environment = os.environ | {"PYTHONPATH": str(REPO / "scripts")}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
