"""What is asked of a given Redis, and what its connections must do."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from pipeline.connect import BLOCK, SOCKET_TIMEOUT, connect, connect_async, verify
from pipeline.errors import RedisUnusable, UsageError
from pipeline.outage import Seen
from pipeline.server import EmbeddedServer, find_server


@pytest.fixture
def client(tmp_path: Path) -> Iterator[redis.Redis]:
    with EmbeddedServer(tmp_path / "redis", "process") as server, connect(server.url, "test") as made:
        yield made


def test_a_server_as_it_should_be_is_taken_without_a_word(client: redis.Redis) -> None:
    assert verify(client) == []


def test_a_server_that_would_delete_queued_groups_is_refused_with_the_command_that_helps(client: redis.Redis) -> None:
    client.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(RedisUnusable, match=r"allkeys-lru.*CONFIG SET maxmemory-policy noeviction"):
        verify(client)


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru"])
def test_a_refused_server_is_named_without_its_password(client: redis.Redis, policy: str) -> None:
    client.config_set("maxmemory-policy", policy)
    with pytest.raises(RedisUnusable, match=rf"--redis-url redis://me:\*\*\*@host:1/2: maxmemory-policy is {policy}"):
        verify(client, "redis://me:secret@host:1/2")


def test_a_server_without_a_log_is_warned_of(client: redis.Redis) -> None:
    client.config_set("appendonly", "no")
    (warning,) = verify(client)
    assert "append-only" in warning


def test_a_replica_is_refused(client: redis.Redis) -> None:
    client.replicaof("127.0.0.1", "1")
    with pytest.raises(RedisUnusable, match="replica"):
        verify(client)


def test_a_cluster_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    options = ["--port", "0", "--unixsocket", str(path), "--cluster-enabled", "yes", "--dir", str(tmp_path)]
    with subprocess.Popen([str(find_server()), *options], stdout=subprocess.DEVNULL) as process:
        try:
            limit = time.monotonic() + 30
            while not path.exists() and time.monotonic() < limit:
                time.sleep(0.01)
            with connect(f"unix://{path}", "test") as made, pytest.raises(RedisUnusable, match="Redis Cluster"):
                verify(made)
        finally:
            process.kill()


@pytest.mark.parametrize("make", [connect, connect_async])
def test_an_url_that_would_decode_groups_as_text_is_refused(make: Any) -> None:
    with pytest.raises(RedisUnusable, match="decode_responses"):
        make("redis://host/0?decode_responses=True", "test")
    make("redis://host/0?decode_responses=False", "test")


@pytest.mark.parametrize("seconds", ["1", "0", "soon"])
def test_an_url_whose_timeout_would_cut_pops_off_is_refused(seconds: str) -> None:
    with pytest.raises(UsageError, match="socket_timeout must be"):
        connect(f"redis://host/0?socket_timeout={seconds}", "test")
    connect("redis://host/0?socket_timeout=2", "test")


def test_an_url_that_is_none_names_the_flag() -> None:
    with pytest.raises(UsageError, match="--redis-url"):
        connect("http://host", "test")


def test_no_command_is_ever_sent_twice_by_the_client_and_no_wait_outlasts_the_socket(client: redis.Redis) -> None:
    options = client.connection_pool.connection_kwargs
    assert options["retry"].get_retries() == 0
    assert options["socket_timeout"] == SOCKET_TIMEOUT > 2 * BLOCK


def test_a_connection_has_a_name_and_is_one_of_few(client: redis.Redis) -> None:
    client.ping()
    assert client.client_getname() in (b"test", "test")
    assert client.connection_pool.max_connections == 4


def test_a_new_connection_tells_whether_it_is_another_server(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "redis", "process") as server:
        seen = Seen()
        client = connect(server.url, "test", seen)
        client.ping()
        client.connection_pool.disconnect()
        client.ping()
        assert (seen.connects, seen.restarted) == (2, False)
        server.restart()
        with pytest.raises(redis.ConnectionError, match="Redis was restarted"):
            client.rpush("list", "not sent")
        assert seen.restarted
        assert client.llen("list") == 0
        client.close()
