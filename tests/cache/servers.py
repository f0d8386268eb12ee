"""A real redis-server for tests, and what may happen to it; a proxy that cuts connections."""

from __future__ import annotations

import datetime
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import valkey
from typing_extensions import override

from cache.kept import SPACE, Kept
from samestate.cache.base import PageKey
from samestate.cache.stores.place import Address, Manners
from samestate.cache.stores.valkey import PREFIX, ValkeyPlace

BINARY = shutil.which("valkey-server") or shutil.which("redis-server")
PASSWORD = "s3cr3t/with@signs"
QUOTED = "s3cr3t%2Fwith%40signs"


def require_server() -> str:
    if BINARY is None:
        if os.environ.get("SAMESTATE_REQUIRE_REDIS"):
            pytest.fail("no valkey-server or redis-server here")
        pytest.skip("no valkey-server or redis-server here")
    return BINARY


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Certificates(NamedTuple):
    """A throw-away authority, and what it signed for 127.0.0.1."""

    ca: Path
    cert: Path
    key: Path


class Server:
    """A server on a port of 127.0.0.1, which keeps nothing on disk."""

    def __init__(self, folder: Path, *options: str, certificates: Certificates | None = None) -> None:
        self._binary = require_server()
        self.port = free_port()
        self._folder = folder
        self._certificates = certificates
        self._lasting: valkey.Valkey | None = None
        listen = ["--port", str(self.port)]
        if certificates:
            listen = ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            listen += ["--tls-cert-file", str(certificates.cert), "--tls-key-file", str(certificates.key)]
            listen += ["--tls-ca-cert-file", str(certificates.ca)]
        self._options = ["--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *listen, *options]
        self._password = PASSWORD if "--requirepass" in options else None
        self.start()

    def start(self) -> None:
        log = (self._folder / "log").open("ab")
        self._process = subprocess.Popen([self._binary, *self._options], stdout=log, stderr=log)
        log.close()
        give_up = time.monotonic() + 30
        while True:
            try:
                with self.client() as client:
                    client.ping()
                    return
            except valkey.ConnectionError:
                if self._process.poll() is not None or time.monotonic() > give_up:
                    pytest.fail((self._folder / "log").read_text())
                time.sleep(0.02)

    def kill(self) -> None:
        if self._lasting:
            self._lasting.close()
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Let it stand still; it keeps its port."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    @contextmanager
    def client(self) -> Iterator[valkey.Valkey]:
        """A new one; with certificates always the same, which reads all that the machine trusts as it connects."""
        if self._certificates is None:
            with closing(self._connect()) as client:
                yield client
        else:
            self._lasting = self._lasting or self._connect(ssl=True, ssl_ca_certs=str(self._certificates.ca))
            yield self._lasting

    def _connect(self, **tls: Any) -> valkey.Valkey:
        return valkey.Valkey(port=self.port, password=self._password, host="127.0.0.1", **tls)


class InServer(Kept):
    """A database of a server."""

    def __init__(self, server: Server, url: str) -> None:
        self.server = server
        self.url = url
        with server.client() as client:
            client.flushall()

    @override
    def open(self, manners: Manners | None = None) -> ValkeyPlace:
        return ValkeyPlace.at(Address(self.url), manners or Manners())

    @override
    def get(self, of: PageKey) -> bytes | None:
        with self.server.client() as client:
            value = client.get(self.name(of))
        assert value is None or isinstance(value, bytes)
        return value

    @override
    def put(self, of: PageKey, stored: bytes) -> None:
        with self.server.client() as client:
            client.set(self.name(of), stored)

    def name(self, of: PageKey) -> bytes:
        return f"{PREFIX}{SPACE.digest.hex()}:{of.hex()}".encode()


class Proxy:
    """Passes bytes on to a server, and cuts the connection once so many came from it, or went to it."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.cut_reply_after: int | None = None
        self.cut_request_after: int | None = None
        self.delay = 0.0
        """Seconds before each piece of a reply."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                for source, sink, is_reply in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pass, args=(source, sink, is_reply), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        passed = 0
        with suppress(OSError):
            while piece := source.recv(16384):
                limit = self.cut_reply_after if is_reply else self.cut_request_after
                if is_reply and self.delay:
                    time.sleep(self.delay)
                if limit is not None and passed + len(piece) > limit:
                    sink.sendall(piece[: max(0, limit - passed)])
                    break
                sink.sendall(piece)
                passed += len(piece)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def make_certificates(folder: Path) -> Certificates:
    """A new authority and a certificate for 127.0.0.1, valid for an hour."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.datetime.now(datetime.UTC)
    issuer_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])

    def build(name: str, public: Any) -> x509.CertificateBuilder:
        builder = (
            x509.CertificateBuilder().subject_name(named(name)).issuer_name(named("throw-away")).public_key(public)
        )
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - datetime.timedelta(minutes=5)).not_valid_after(
            now + datetime.timedelta(hours=1)
        )

    authority = build("throw-away", issuer_key.public_key()).add_extension(
        x509.BasicConstraints(ca=True, path_length=None), critical=True
    )
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))])
    server = build("server", key.public_key()).add_extension(address, critical=False)
    made = Certificates(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    pem = serialization.Encoding.PEM
    made.ca.write_bytes(authority.sign(issuer_key, hashes.SHA256()).public_bytes(pem))
    made.cert.write_bytes(server.sign(issuer_key, hashes.SHA256()).public_bytes(pem))
    plain = serialization.NoEncryption()
    made.key.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return made
