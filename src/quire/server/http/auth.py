"""Access control: API keys, and checks of the Host header."""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.common.errors import ConfigError
from quire.server.config import ServerArgs, is_loopback, keys_in
from quire.server.http.errors import ApiError
from quire.server.http.state import context_of

_KEY_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(slots=True)
class ApiKeys:
    """Names of keys, and the keys as hashes, so that the time of a comparison reveals nothing about a key. Only
    `reload_pair` changes them."""

    _digests: tuple[tuple[str, bytes], ...]
    have_changed: bool = False
    """Whether other keys were valid before."""

    @classmethod
    def load(cls, args: ServerArgs, environ: Mapping[str, str] = os.environ) -> ApiKeys:
        """All API keys that the arguments, the environment and the key file give. Raises ConfigError."""
        return cls._of("API key", args.api_key, environ.get("QUIRE_API_KEY", ""), "api_key_file", args.api_key_file)

    @classmethod
    def load_admin(cls, args: ServerArgs, environ: Mapping[str, str] = os.environ) -> ApiKeys:
        """All keys for administration, from the same sources. Raises ConfigError."""
        given = environ.get("QUIRE_ADMIN_KEY", "")
        return cls._of("admin key", args.admin_key, given, "admin_key_file", args.admin_key_file)

    @classmethod
    def load_pair(cls, args: ServerArgs) -> tuple[ApiKeys, ApiKeys]:
        """API keys and keys for administration. Raises ConfigError, also for a key that is both."""
        keys, admin_keys = cls.load(args), cls.load_admin(args)
        if keys.overlaps(admin_keys):
            raise ConfigError(
                "an admin key is also an API key, so that its clients could administrate: use different keys"
            )
        return keys, admin_keys

    def reload_pair(self, admin_keys: ApiKeys, args: ServerArgs) -> None:
        """Change these API keys, and these keys for administration, to what the same sources give now. Raises
        ConfigError and changes neither. Where there were keys, there are keys afterwards."""
        keys, new_admin_keys = self.load_pair(args)
        self.have_changed |= self._digests != keys._digests
        self._digests, admin_keys._digests = keys._digests, new_admin_keys._digests

    @classmethod
    def _of(cls, kind: str, given: tuple[str, ...], variable: str, file_name: str, file: str | None) -> ApiKeys:
        unnamed = [*given, *keys_in(variable)]
        named = [(f"key-{number}", key) for number, key in enumerate(unnamed, start=1)]
        if file is not None:
            named += _read_key_file(file_name, Path(file))
        owners: dict[str, str] = {}
        for name, key in named:
            if not key.strip() or key != key.strip():
                raise ConfigError(f"the {kind} named {name!r} is empty or has white space around it")
            if owners.setdefault(key, name) != name:
                raise ConfigError(f"the same {kind} has two names, {owners[key]!r} and {name!r}")
        return cls(tuple((name, sha256(key.encode()).digest()) for name, key in named))

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __len__(self) -> int:
        return len(self._digests)

    def overlaps(self, other: ApiKeys) -> bool:
        """Whether a key belongs to both."""
        return any(digest in {known for _, known in other._digests} for _, digest in self._digests)

    def name_of(self, key: bytes) -> str | None:
        """The name of a key, or None if it is unknown. The time does not depend on the key."""
        digest, found = sha256(key).digest(), None
        for name, known in self._digests:
            if hmac.compare_digest(digest, known):
                found = name
        return found


def _read_key_file(argument: str, path: Path) -> Iterator[tuple[str, str]]:
    """Parse `name:key` lines, ignoring empty lines and lines that begin with #. Error messages never quote a line.

    A file without keys is refused: the server would be open to all, or closed to its administrators.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{argument}={str(path)!r} cannot be read: {error}") from error
    has_keys = False
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        name, colon, key = line.partition(":")
        if not colon or not _KEY_NAME.fullmatch(name):
            raise ConfigError(
                f"{argument}={str(path)!r}, line {number}: must be name:key; names: letters, digits, '.', '_', '-'"
            )
        has_keys = True
        yield name, key.strip()
    if not has_keys:
        raise ConfigError(f"{argument}={str(path)!r} has no keys: write name:key on a line for each, or leave it out")


def callers_are_one_tenant(args: ServerArgs, keys: ApiKeys) -> bool:
    """Whether all callers may see each other's prompts: they have and had one key, or none and are on this machine."""
    return len(keys) == 1 and not keys.have_changed if keys else args.is_local


class Authentication:
    """Around an endpoint: a request needs a key, as `Authorization: Bearer KEY` or `x-api-key: KEY`. The key's name
    becomes the request's tenant."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the endpoint if the key is valid. Raises ApiError (401)."""
        _note_tenant(scope, self._keys, "this server requires an API key", "invalid_api_key")
        await self._app(scope, receive, send)


class Administration:
    """Around an endpoint: a request needs a key for administration, sent as an API key is. Its name is the tenant."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the endpoint if the key is valid. Raises ApiError: 401, or 403 if the server has no such keys."""
        if not self._keys:
            raise ApiError(
                403,
                "this endpoint is for administrators, and the server has no admin key: start it with admin_key_file, "
                "admin_key or QUIRE_ADMIN_KEY",
                code="admin_disabled",
            )
        _note_tenant(scope, self._keys, "this endpoint requires an admin key", "invalid_admin_key")
        await self._app(scope, receive, send)


def _note_tenant(scope: Scope, keys: ApiKeys, requirement: str, code: str) -> None:
    given = [key for key in _given_keys(scope) if key]
    names = [name for key in given if (name := keys.name_of(key)) is not None]
    if not names:
        sent = "; the key that was sent is not valid" if given else ""
        message = f"{requirement}: send `Authorization: Bearer KEY` or `x-api-key: KEY`{sent}"
        raise ApiError(401, message, code=code, headers={"www-authenticate": "Bearer"})
    context_of(scope).tenant = names[0]


def _given_keys(scope: Scope) -> Iterator[bytes]:
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            yield value[7:].strip()
        elif name == b"x-api-key":
            yield value.strip()


class AllowedHosts:
    """Middleware: only requests for these host names. Without it, a page that a browser on this machine has open could
    give its own name this machine's address, and then read what a server without keys answers (DNS rebinding)."""

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...]) -> None:
        """`hosts` are names, for any port, or names with one; if empty, names of this machine are allowed."""
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application if the host is allowed. Raises ApiError (403)."""
        if scope["type"] == "http" and not self._allows(scope):
            raise ApiError(
                403, "requests for this host are refused; the operator can add it to allowed_hosts", code="wrong_host"
            )
        await self._app(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"host"), None)
        if given is None:  # only HTTP/1.0 allows this, which no browser speaks; the protocol refuses more than one
            return True
        host = given.decode("latin-1").lower()
        name = re.sub(r":\d*$", "", host)
        return bool(self._hosts & {host, name}) if self._hosts else is_loopback(name)


def checks_hosts(args: ServerArgs, has_keys: bool) -> bool:
    """Whether to check hosts: by default, if any program on this machine may call the server."""
    if args.allowed_hosts:
        return "*" not in args.allowed_hosts
    return not has_keys and args.is_local and args.uds is None
