"""Secrets stay where they belong: TLS, users with few rights, passwords of any characters, private folders."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import ssl
import stat
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
import redis
from processes import ECHO_RUN, PACE, Stage, Started, eventually, prompts, steps

from pipeline.connect import connect
from pipeline.errors import UsageError
from pipeline.log import mask
from pipeline.server import EmbeddedServer

ROOT = Path(__file__).parents[1]
PASSWORD = "s3cr:t@/w?rd#% &=é'\"\\"
TOKEN = "hf_neverWrittenAnywhere"


@dataclass(frozen=True)
class Secure:
    """A server behind TLS, and its user with few rights."""

    port: int
    authority: Path
    admin: redis.Redis

    @property
    def url(self) -> str:
        where = f"localhost:{self.port}?ssl_ca_certs={quote(str(self.authority))}"
        return f"rediss://millpond:{quote(PASSWORD, safe='')}@{where}"

    def shown_in(self, text: bytes | str) -> bool:
        raw = text.encode() if isinstance(text, str) else text
        spellings = {PASSWORD, quote(PASSWORD), quote(PASSWORD, safe=""), json.dumps(PASSWORD)[1:-1], TOKEN}
        return any(spelling.encode() in raw for spelling in spellings)


def granted() -> list[str]:
    """The rights that docs/redis-cli.md says suffice."""
    guide = (ROOT / "docs" / "redis-cli.md").read_text()
    found = re.search(r"ACL SETUSER millpond ((.*\\\n)*.*)", guide)
    assert found
    return shlex.split(found[1].replace("\\\n", " ").replace(">PASSWORD", ""))


@contextmanager
def tls(folder: Path, socket: str) -> Iterator[tuple[int, Path]]:
    """The port of a TLS end in front of `socket`, and the certificate to trust."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    make = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = ["openssl", *make.split(), *names, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    ready, over = threading.Event(), asyncio.Event()
    loop, port = asyncio.new_event_loop(), [0]

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        except OSError:
            pass  # one end went away: so does the other
        finally:
            sink.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_unix_connection(socket)
        await asyncio.gather(copy(reader, ours), copy(theirs, writer))

    async def serve() -> None:
        server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
        port[0] = server.sockets[0].getsockname()[1]
        ready.set()
        await over.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(30)
        yield port[0], certificate
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[Secure]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    with EmbeddedServer(tmp_path / "server", "process") as server, closing(redis.Redis.from_url(server.url)) as admin:
        admin.execute_command("ACL", "SETUSER", "millpond", *granted(), f">{PASSWORD}")
        with tls(tmp_path, str(server.socket)) as (port, certificate):
            yield Secure(port, certificate, admin)


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found


def commands(run: Started) -> bytes:
    """The command lines of a run's processes, which anybody on the machine can read."""
    found = b""
    for pid in tree(run.process.pid):
        try:
            found += Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue  # it has just ended
    return found


def test_a_whole_run_over_tls_with_a_user_of_few_rights_shows_its_password_nowhere(
    secure: Secure, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    before = os.umask(0)
    try:
        with Stage(tmp_path) as stage:
            env = {"MILLPOND_REDIS_URL": secure.url, "HF_TOKEN": TOKEN}
            data = prompts(tmp_path, 40)
            args = (*ECHO_RUN, *PACE, "--prompt-data", data, "--num-epoch", "1", "--save-interval", "3")
            args += ("--rm-place", "worker")
            run = stage.millpond("run", "--out", out, *args, "--echo-train-seconds", "0.1", **env)
            eventually(lambda: len(run.children()) == 4 and steps(out), "a run at work")
            assert b"pipeline.cli" in (seen := commands(run))
            assert not secure.shown_in(seen)
            said = run.ends(0)
            assert "Prompts: 40 committed" in said
            for words in (["status"], ["why"], ["audit"], ["inspect", "prompts"], ["purge", "--yes"]):
                place = ("--run", "run") if words[0] != "status" else (out,)
                said += stage.millpond(*words, *place, **env).ends(0)
    finally:
        os.umask(before)
    assert not secure.shown_in(said)
    assert f"rediss://millpond:***@localhost:{secure.port}" in said
    paths = [out, *out.rglob("*")]
    assert {stat.S_IMODE(p.stat().st_mode) for p in paths if p.is_dir()} == {0o700}
    assert {stat.S_IMODE(p.stat().st_mode) for p in paths if p.is_file()} == {0o600}
    assert [p for p in paths if p.is_file() and secure.shown_in(p.read_bytes())] == []
    assert not secure.admin.keys("millpond:*")
    assert not secure.admin.keys("rq:*run*")


def test_the_documented_rights_are_no_more_than_a_run_needs(secure: Secure) -> None:
    with closing(connect(secure.url, "test")) as client:
        assert client.ping()
        for words in (
            ["FLUSHALL"], ["KEYS", "*"], ["CONFIG", "SET", "maxmemory", "1"], ["SHUTDOWN"], ["ACL", "LIST"],
            ["SET", "other", "1"], ["GET", "other"], ["SCRIPT", "FLUSH"], ["MONITOR"],
            ["PUBLISH", "other", "1"], ["REPLICAOF", "a", "1"], ["SAVE"], ["MODULE", "LIST"],
        ):  # fmt: skip
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*words)


def test_a_certificate_that_nobody_vouches_for_is_no_redis(secure: Secure, tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        url = secure.url.partition("?")[0]
        said = stage.millpond("status", "--run", "x", "--redis-patience", "0.5", MILLPOND_REDIS_URL=url).ends(3)
    assert "certificate verify failed" in said
    assert "Traceback" not in said
    assert not secure.shown_in(said)


def test_a_wrong_password_is_one_sentence(secure: Secure, tmp_path: Path) -> None:
    data = prompts(tmp_path, 1)
    url = secure.url.replace("millpond:", "millpond:wr0ng", 1)
    with Stage(tmp_path) as stage:
        commands = (
            ["status"],
            ["why"],
            ["feed", "--prompt-data", data],
            ["generate", "--engine", "echo", "--rm-type", "random"],
        )
        started = [stage.millpond(*words, "--run", "x", MILLPOND_REDIS_URL=url) for words in commands]
        for said in (one.ends(2) for one in started):
            assert "millpond: Redis takes no such user name or password" in said
            assert "Traceback" not in said
            assert "wr0ng" not in said


@pytest.mark.parametrize(
    "url", ["redis://:sec/ret@host:1/0", "redis://:sec?ret@host:1", "rediss://u:sec#ret@h:99999999"]
)
def test_a_url_whose_password_is_not_encoded_is_refused_without_showing_a_part_of_it(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        connect(url, "test").ping()
    assert "sec" not in str(caught.value)
    assert "percent-encoded" in str(caught.value)


@pytest.mark.parametrize(
    "password", ["plain", "a%2Fb%40c%3A", "%20", "p+ss", "%C3%A9", "x@y", "a:b", "it's", "%22q%22", "%25"]
)
@pytest.mark.parametrize(
    "form", ["redis://:{}@h:1/0", "rediss://u:{}@h:1?db=1", "unix://u:{}@/a/b.sock", "redis://h?password={}&db=1"]
)
def test_every_spelling_of_a_password_is_masked(form: str, password: str) -> None:
    for around in ("{}", "cannot reach {} now", "('{}',)", "a {} b {}"):
        shown = mask(around.replace("{}", form.format(password)))
        assert password not in shown.replace("password=", "")
        assert "***" in shown
