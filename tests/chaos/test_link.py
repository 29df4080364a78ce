"""A link does to connections what it is told, at the byte where it is told."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import pytest
import redis
from link import COMMAND, REPLY, Link
from processes import eventually
from redis.backoff import NoBackoff
from redis.retry import Retry

PING = b"*1\r\n$4\r\nPING\r\n"


@pytest.fixture
def link(redis_url: str) -> Iterator[Link]:
    with Link(redis_url) as made:
        yield made


def connected(link: Link) -> socket.socket:
    """A connection that is let in."""
    parts = urlsplit(link.url)
    made = socket.create_connection((str(parts.hostname), parts.port or 0), timeout=10)
    made.sendall(f"AUTH {parts.password}\r\n".encode())
    assert made.recv(100) == b"+OK\r\n"
    return made


def client(link: Link, timeout: float = 10.0) -> redis.Redis:
    return redis.Redis.from_url(link.url, retry=Retry(NoBackoff(), 0), socket_timeout=timeout)


def test_what_is_sent_comes_through_whole(link: Link) -> None:
    with client(link) as one:
        assert one.echo(b"x" * 3_000_000) == b"x" * 3_000_000


def test_all_connections_are_reset(link: Link) -> None:
    with connected(link) as one, connected(link) as two:
        link.reset()
        for end in (one, two):
            with pytest.raises(ConnectionResetError):
                end.recv(1)
        with connected(link):
            pass


def test_a_reply_is_cut_where_it_was_told(link: Link) -> None:
    with connected(link) as one:
        link.cut(REPLY, 0.5)
        assert link.ordered
        one.sendall(PING)
        with suppress(ConnectionResetError):  # which may overtake what came before it
            assert one.recv(100) == b"+PO"
            one.recv(100)
        eventually(lambda: not link.ordered, "a cut")


@pytest.mark.parametrize(("way", "done"), [(COMMAND, 0), (REPLY, 1)])
def test_the_command_meant_is_cut_and_is_done_only_where_its_reply_is_lost(
    way: str, done: int, link: Link, redis_url: str
) -> None:
    with client(link) as one, redis.Redis.from_url(redis_url) as direct:
        key = f"cut-{way}-{link.url[-5:]}"
        link.cut(way, 0.0, b"INCR")
        assert one.ping()
        with pytest.raises(redis.ConnectionError):
            one.incr(key)
        assert int(direct.get(key) or 0) == done
        assert one.incr(key) == done + 1
        direct.delete(key)


@pytest.mark.parametrize("late", [True, False])
def test_what_a_hole_swallowed_comes_late_or_never(late: bool, link: Link, redis_url: str) -> None:
    with client(link, 0.3) as one, redis.Redis.from_url(redis_url) as direct:
        key = f"hole-{link.url[-5:]}-{late}"
        one.ping()
        link.hole()
        with pytest.raises(redis.TimeoutError):
            one.incr(key)
        assert direct.get(key) is None
        link.fill(late)
        if late:
            eventually(lambda: direct.get(key), "what its sender had given up")
        link.heal()
        assert int(one.incr(key)) == 1 + late
        direct.delete(key)


def test_nobody_listens_until_it_is_healed(link: Link) -> None:
    with client(link) as one:
        one.ping()
        link.refuse()
        for _ in range(2):
            with pytest.raises(redis.ConnectionError):
                one.ping()
        link.heal()
        assert one.ping()


def test_one_half_is_closed_and_the_other_works(link: Link) -> None:
    with connected(link) as one:
        link.half_close(REPLY)
        assert one.recv(1) == b""
        one.sendall(PING)  # nobody minds
    with connected(link) as one:
        link.half_close(COMMAND)
        assert one.recv(1) == b""  # the server, told that no more comes, closes its own half
