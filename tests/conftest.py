"""One embedded server for the whole session; each test has a run of its own on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake import SPARED, FakeRig
from rig import Rig

from pipeline.server import EmbeddedServer


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-seed", type=int, help="seed of a test in tests/chaos that is to be played again")
    parser.addoption("--soak-minutes", type=float, default=30.0, help="how long `-m soak` goes on")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "spared(why): not asked of fakeredis; why is a key of fake.SPARED")


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedServer(tmp_path_factory.mktemp("redis"), "process") as server:
        yield server.url


@pytest.fixture(params=["server", "fakeredis"])
def run(request: pytest.FixtureRequest, redis_url: str) -> Iterator[Rig]:
    """A run on the real server, and once more on fakeredis."""
    spared = request.node.get_closest_marker("spared")
    if request.param == "fakeredis" and spared:
        pytest.skip(SPARED[spared.args[0]])
    rig = Rig(redis_url) if request.param == "server" else FakeRig()
    yield rig
    rig.close()


@pytest.fixture
def real(redis_url: str) -> Iterator[Rig]:
    """A run on the real server only."""
    rig = Rig(redis_url)
    yield rig
    rig.close()
