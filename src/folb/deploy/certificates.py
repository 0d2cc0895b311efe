"""Certificates and node keys of a deployment, as `docs/deployment.md` makes them with `openssl` and `ssh-keygen`."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from folb.deploy.superlink import CA, CERTIFICATE, KEY


def certificates(home: Path, hosts: Sequence[str], days: int = 365) -> None:
    """Write ca.crt, server.pem and server.key, for a server with the names `hosts`. The authority's key is not kept."""
    now = datetime.now(UTC)
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    issuer = _named("folb certificate authority")

    def signed(name: x509.Name, key: ec.EllipticCurvePrivateKey, *more: tuple[x509.ExtensionType, bool]) -> bytes:
        made = (
            x509.CertificateBuilder()
            .issuer_name(issuer)
            .subject_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=5))  # clocks differ
            .not_valid_after(now + timedelta(days=days))
        )
        for extension, critical in more:
            made = made.add_extension(extension, critical)
        return made.sign(authority, hashes.SHA384()).public_bytes(Encoding.PEM)

    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)  # signs certificates and lists
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    root = signed(issuer, authority, (x509.BasicConstraints(True, 0), True), (usage, True), (identifier, False))
    names = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
    serves = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    by = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    own = ((x509.BasicConstraints(False, None), True), (names, False), (serves, False), (by, False))
    home.mkdir(parents=True, exist_ok=True)
    (home / CA).write_bytes(root)
    (home / CERTIFICATE).write_bytes(signed(_named(hosts[0]), server, *own))
    _keep(home / KEY, server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def node_key(path: Path) -> None:
    """Write a node's key pair, `path` and `path`.pub, as `ssh-keygen -t ecdsa -b 384` does."""
    key = ec.generate_private_key(ec.SECP384R1())
    _keep(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    path.with_name(f"{path.name}.pub").write_bytes(public + b"\n")


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _keep(path: Path, secret: bytes) -> None:
    """Write a file that only its owner may read."""
    path.touch(0o600)
    path.write_bytes(secret)
