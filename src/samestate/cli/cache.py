"""``samestate cache``: what lies in a tier, whether it is whole, what goes, and copies into another tier."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from samestate.cache.base import StoreError
from samestate.cache.envelope import Namespace
from samestate.cache.stores import admin
from samestate.cache.stores.place import Manners, OnDamage, Place, parse_size
from samestate.cache.stores.urls import open_place
from samestate.cli.failures import Failure
from samestate.cli.progress import bytes_read
from samestate.evidence.text import printable

DAMAGED, NOTHING = 1, 3
LOOKING = Manners(create=False, keep_damaged=True, only_looking=True)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

_namespace = click.option("--namespace", metavar="NAME", help="One, by name or by the first digits of its digest.")
_as_json = click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")


@click.group("cache")
def cache() -> None:
    """Look after a tier of pages: a folder, a Valkey or Redis server, a bucket.

    URL: file:///folder (or a folder's path), valkey://host:port/0, valkeys://host:port/0, object+s3://bucket/prefix.
    """


@cache.command("stat")
@click.argument("url")
@_namespace
@_as_json
def stat(url: str, namespace: str | None, as_json: bool) -> None:
    """Count pages and bytes of every namespace at URL, and say when it was last used."""
    with _place(url) as place:
        found = admin.stat(place, admin.choose(place, namespace))
    if as_json:
        _print([{**_named(one.namespace), **_numbers(one)} for one in found])
        return
    table = Table("namespace", "pages", "bytes", "orphan bytes", "last used", "name", box=None, pad_edge=False)
    for one in found:
        cells = (_short(one.namespace), f"{one.pages:,}", f"{one.stored_bytes:,}", _orphans(one), _when(one.last_used))
        table.add_row(*cells, printable(one.namespace.name))
    Console(width=None if Console().is_terminal else 160).print(table)
    pages, held = sum(one.pages for one in found), sum(one.stored_bytes for one in found)
    click.echo(f"{len(found)} namespace{'s' * (len(found) != 1)}, {_pages(pages)}, {held:,} bytes ({decimal(held)})")


def _orphans(one: admin.Stat) -> str:
    return "?" if one.orphan_bytes is None else f"{one.orphan_bytes:,}"


@cache.command("list")
@click.argument("url")
@_namespace
@_as_json
def list_(url: str, namespace: str | None, as_json: bool) -> None:
    """Name every page at URL: namespace, key, bytes with the envelope, when it was last used."""
    with _place(url) as place:
        spaces = admin.choose(place, namespace)
        infos = [(space, info) for space in spaces for info in place.store(space).scan()]
    if as_json:
        rows = [
            {**_named(space), "key": info.key.hex(), "stored_bytes": info.stored_bytes, "last_used": info.last_used}
            for space, info in infos
        ]
        _print(rows)
        return
    for space, info in infos:
        click.echo(f"{_short(space)}  {info.key.hex()}  {info.stored_bytes:>14,}  {_when(info.last_used)}")


@cache.command("verify")
@click.argument("url")
@_namespace
@click.option("--remove", is_flag=True, help="Remove damaged pages; engines do so when they meet one.")
@_as_json
def verify(url: str, namespace: str | None, remove: bool, as_json: bool) -> None:
    """Read every page at URL and hold it against its checksum and its place.

    Exit codes: 0 all are whole · 1 some are damaged · 2 the place cannot be used · 3 there was nothing to verify.
    """
    why: dict[str, str] = {}
    manners = LOOKING._replace(keep_damaged=not remove, on_damage=_remember(why))
    with _place(url, manners) as place:
        spaces = admin.choose(place, namespace)
        with bytes_read("verifying", sum(one.stored_bytes for one in admin.stat(place, spaces))) as told:
            done = [admin.verify(place.store(space), space, told) for space in spaces]
    if as_json:
        _print([_with_damage(one, why) for one in done])
    else:
        for line in _damage_lines(done, why, "damaged, removed" if remove else "damaged"):
            click.echo(line)
        whole, held = sum(one.whole for one in done), sum(one.stored_bytes for one in done)
        bad, gone = sum(len(one.damaged) for one in done), sum(one.gone for one in done)
        click.echo(f"{_pages(whole)} whole, {held:,} bytes; {bad:,} damaged; {gone:,} went meanwhile")
    _exit(any(one.damaged for one in done), any(one.whole for one in done))


@cache.command("evict")
@click.argument("url")
@_namespace
@click.option("--older-than", metavar="TIME", help="Pages not used for so long: 90s, 30m, 12h, 7d.")
@click.option("--bytes", "leave", metavar="SIZE", help="The least recently used, until at most SIZE is left: 100GiB.")
@click.option("--key", metavar="HEX", help="Keys that begin so: a page's, or without its last 8 digits a family's.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@_as_json
def evict(
    url: str,
    namespace: str | None,
    older_than: str | None,
    leave: str | None,
    key: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove pages at URL: those that --older-than and --bytes name; with --namespace or --key alone, all of these."""
    if not (namespace or older_than or leave or key):
        raise Failure("evict: say what goes: --older-than, --bytes, --key or --namespace")
    before = time.time() - _duration(older_than) if older_than else None
    with _place(url) as place:
        limit = parse_size(leave, "--bytes") if leave else None
        gone = admin.evict(place, admin.choose(place, namespace), before, limit, dry_run, key or "")
    if as_json:
        _print({**gone._asdict(), "dry_run": dry_run})
        return
    click.echo(f"{_pages(gone.pages)}, {gone.stored_bytes:,} bytes {'would go' if dry_run else 'are gone'}")


@cache.command("warm")
@click.argument("source")
@click.argument("target")
@_namespace
@_as_json
def warm(source: str, target: str, namespace: str | None, as_json: bool) -> None:
    """Copy pages from the place SOURCE to the place TARGET, each verified on the way; pages that are there stay.

    Exit codes: 0 all are there · 1 some are damaged at SOURCE, or found no room · 3 there was nothing to copy.
    """
    why: dict[str, str] = {}
    manners = LOOKING._replace(on_damage=_remember(why))
    with _place(source, manners) as origin, _place(target, Manners()) as destination:
        spaces = admin.choose(origin, namespace)
        with bytes_read("copying", sum(one.stored_bytes for one in admin.stat(origin, spaces))) as told:
            done = [admin.warm(origin.store(space), destination.store(space), space, told) for space in spaces]
    if as_json:
        _print([_with_damage(one, why) for one in done])
    else:
        for line in _damage_lines(done, why, "damaged, not copied"):
            click.echo(line)
        copied, held = sum(one.copied for one in done), sum(one.stored_bytes for one in done)
        present, no_room = sum(one.present for one in done), sum(one.no_room for one in done)
        click.echo(f"{_pages(copied)} copied, {held:,} bytes; {present:,} were there; {no_room:,} found no room")
    _exit(any(one.damaged or one.no_room for one in done), any(one.copied or one.present for one in done))


@contextmanager
def _place(url: str, manners: Manners = LOOKING) -> Iterator[Place]:
    try:
        place = open_place(url if "://" in url else Path(url).absolute().as_uri(), manners)
        try:
            yield place
        finally:
            place.close()
    except (StoreError, ValueError) as error:
        raise Failure(str(error)) from None


def _exit(bad: bool, good: bool) -> None:
    if bad:
        raise SystemExit(DAMAGED)
    if not good:
        click.echo("there was nothing to look at", err=True)
        raise SystemExit(NOTHING)


def _duration(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if match is None:
        raise Failure(f"--older-than: {text!r} is no time; say 90s, 30m, 12h or 7d")
    return float(match[1]) * _SECONDS[match[2]]


def _short(namespace: Namespace) -> str:
    return namespace.digest.hex()[:12]


def _when(moment: float | None) -> str:
    if moment is None:
        return "unknown"
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _named(namespace: Namespace) -> dict[str, str]:
    return {"namespace": namespace.name, "digest": namespace.digest.hex()}


def _numbers(one: Any) -> dict[str, Any]:
    return {name: value for name, value in one._asdict().items() if name not in ("namespace", "damaged")}


def _remember(why: dict[str, str]) -> OnDamage:
    """Keeps what is wrong with a page, by its key in hex."""
    return lambda place, key, fault: why.__setitem__(key.hex(), fault)


def _with_damage(one: admin.Verified | admin.Warmed, why: dict[str, str]) -> dict[str, Any]:
    return {**_named(one.namespace), **_numbers(one), "damaged": {key.hex(): why[key.hex()] for key in one.damaged}}


def _damage_lines(done: Sequence[admin.Verified | admin.Warmed], why: dict[str, str], word: str) -> Iterator[str]:
    for one in done:
        for key in one.damaged:
            yield f"{_short(one.namespace)}  {key.hex()}  {word}: {why[key.hex()]}"


def _pages(count: int) -> str:
    return f"{count:,} page{'s' * (count != 1)}"


def _print(facts: Any) -> None:
    click.echo(json.dumps(facts, indent=2))
