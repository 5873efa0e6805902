# SPDX-License-Identifier: Apache-2.0
"""TLS and passwords in the form of Prometheus's web configuration file.

Keys that Prometheus knows and this server does not have are errors like unknown ones: a
restriction that is not enforced must not look as if it were. Relative paths are relative to the
file, as there.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import ssl
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated, Literal

import msgspec
import yaml

from .httpd import Request, Response

MAX_BYTES = 1 << 20
CHECKS_PER_SECOND = 4.0
"""Passwords that are hashed at most: each takes a tenth of a second. Right ones are remembered."""
_REMEMBERED = 64
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}

Version = Literal["TLS12", "TLS13"]
Hash = Annotated[str, msgspec.Meta(pattern=r"^\$2[aby]\$\d\d\$[./A-Za-z0-9]{53}$")]


class _Tls(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    cert_file: str
    key_file: str
    client_auth_type: Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"] = (
        "NoClientCert"
    )
    client_ca_file: str | None = None
    min_version: Version = "TLS12"
    max_version: Version = "TLS13"


class _Web(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    tls_server_config: _Tls | None = None
    basic_auth_users: dict[str, Hash] = {}


class WebConfigError(ValueError):
    """The file is wrong; the text says what, in one line."""


@dataclass(slots=True)
class WebConfig:
    """``tls`` None: plain HTTP. ``users``: bcrypt hashes by name; none: everybody may ask."""

    tls: ssl.SSLContext | None = None
    users: dict[str, str] = field(default_factory=dict)
    _good: OrderedDict[bytes, None] = field(default_factory=OrderedDict, repr=False)
    _tokens: float = field(default=CHECKS_PER_SECOND, repr=False)
    _at: float = field(default=0.0, repr=False)

    def refusal(self, request: Request) -> Response | None:
        """None when the request may be answered."""
        if not self.users or self._known(request.headers.get("authorization", "")):
            return None
        return Response(
            HTTPStatus.UNAUTHORIZED,
            body=b"Unauthorized\n",
            headers=[("WWW-Authenticate", 'Basic realm="profinferd"')],
        )

    def _known(self, authorization: str) -> bool:
        scheme, _, coded = authorization.partition(" ")
        if scheme.lower() != "basic":
            return False
        try:
            name, colon, password = base64.b64decode(coded.strip(), validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError, ValueError):
            return False
        hashed = self.users.get(name)
        if not colon or hashed is None or "\0" in password:
            return False
        digest = hashlib.sha256(f"{hashed}\0{password}".encode()).digest()
        for good in self._good:
            if hmac.compare_digest(good, digest):
                return True
        if not self._may_check() or not _fits(password, hashed):
            return False
        self._good[digest] = None
        while len(self._good) > _REMEMBERED:
            self._good.popitem(last=False)
        return True

    def _may_check(self) -> bool:
        now = time.monotonic()
        self._tokens = min(CHECKS_PER_SECOND, self._tokens + (now - self._at) * CHECKS_PER_SECOND)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


def _fits(password: str, hashed: str) -> bool:
    import bcrypt

    # bcrypt looks at 72 bytes, and its newer versions refuse more.
    return bool(bcrypt.checkpw(password.encode()[:72], hashed.encode()))


def load_web_config(path: str) -> WebConfig:
    """Raises WebConfigError."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES)
        found = msgspec.yaml.decode(data, type=_Web) if data.strip() else _Web()
    except OSError as error:
        raise WebConfigError(f"cannot read {path} ({error.strerror})") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise WebConfigError(f"{path}: {' '.join(str(error).split())[:300]}") from error
    except yaml.YAMLError as error:
        raise WebConfigError(f"{path} is not YAML: {' '.join(str(error).split())[:300]}") from error
    if found.basic_auth_users:
        try:
            import bcrypt  # noqa: F401
        except ImportError as error:
            raise WebConfigError(
                f"{path}: basic_auth_users needs the Python package bcrypt (install profinferd[web])"
            ) from error
    tls = _context(found.tls_server_config, os.path.dirname(path)) if found.tls_server_config else None
    return WebConfig(tls, dict(found.basic_auth_users))


def _context(tls: _Tls, folder: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.maximum_version = _VERSIONS[tls.min_version], _VERSIONS[tls.max_version]
    try:
        context.load_cert_chain(os.path.join(folder, tls.cert_file), os.path.join(folder, tls.key_file))
        if tls.client_auth_type != "NoClientCert":
            if tls.client_ca_file is None:
                raise WebConfigError(f"client_auth_type {tls.client_auth_type} needs client_ca_file")
            context.load_verify_locations(os.path.join(folder, tls.client_ca_file))
            needed = tls.client_auth_type == "RequireAndVerifyClientCert"
            context.verify_mode = ssl.CERT_REQUIRED if needed else ssl.CERT_OPTIONAL
        elif tls.client_ca_file is not None:
            raise WebConfigError("client_ca_file is given, and client_auth_type asks for no certificate")
    except ssl.SSLError as error:
        raise WebConfigError(f"the certificate or key is not usable: {error.reason or error}") from error
    except OSError as error:
        raise WebConfigError(f"cannot read the certificate or key ({error.strerror})") from error
    return context
