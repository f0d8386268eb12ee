"""Servers that tests of stores share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cache.servers import PASSWORD, Certificates, Server, make_certificates


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """No password, not encrypted."""
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def secure_server(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[Server]:
    """A password, and encrypted only."""
    folder = tmp_path_factory.mktemp("secure-server")
    server = Server(folder, "--requirepass", PASSWORD, certificates=certificates)
    yield server
    server.kill()
