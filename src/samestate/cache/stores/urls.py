"""Places and stores by URL.

``file:///folder`` · ``valkey://host:port/0``, ``valkeys://`` where encrypted (``redis://`` and ``rediss://`` are the
same) · ``object+s3://bucket/prefix``, and whatever else fsspec knows, behind ``object+``.
"""

from __future__ import annotations

from samestate.cache.base import PageStore
from samestate.cache.envelope import Namespace
from samestate.cache.stores.place import Address, Manners, Place

FORMS = "file:///folder, valkey://host:port/0, valkeys://host:port/0 or object+s3://bucket/prefix"
_VALKEY = {"valkey", "valkeys", "redis", "rediss"}


def open_place(url: str, manners: Manners | None = None) -> Place:
    """The place at `url`.

    Raises:
        ValueError: the URL is none of a place, or its package is not installed; one line.
        StoreError: the place cannot be used now.

    """
    address, manners = Address(url), manners or Manners()
    if address.scheme == "file":
        from samestate.cache.stores.disk import DiskPlace

        return DiskPlace.at(address, manners)
    if address.scheme in _VALKEY:
        try:
            from samestate.cache.stores.valkey import ValkeyPlace
        except ModuleNotFoundError as error:
            raise _not_installed(address, error, "valkey") from None
        return ValkeyPlace.at(address, manners)
    if address.scheme.startswith("object+"):
        try:
            from samestate.cache.stores.object import ObjectPlace
        except ModuleNotFoundError as error:
            raise _not_installed(address, error, "object") from None
        return ObjectPlace.at(address, manners)
    raise ValueError(f"{address.shown or url!r}: no place for pages; say {FORMS}")


def open_store(url: str, namespace: str, manners: Manners | None = None) -> PageStore:
    """The pages of one namespace, by its name, at `url`. Raises as `open_place` does."""
    return open_place(url, manners).store(Namespace.named(namespace), alone=True)


def _not_installed(address: Address, error: ModuleNotFoundError, extra: str) -> ValueError:
    return ValueError(f"{address.shown}: needs the package {error.name}; pip install 'samestate[{extra}]'")
