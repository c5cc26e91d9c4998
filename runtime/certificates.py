"""An authority of one's own and certificates from it: for tests, testbeds, and small overlays.

Who has a certificate authority already uses that one; `runtime.tls` says what names it must sign.
Keys are of the curve P-256. The authority's key stays where certificates are made; a node needs only
`authority.pem` and its own two files.
"""

import datetime as dt
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from overlay.errors import InvalidNameError
from overlay.messages import Role
from overlay.names import check_name
from runtime.errors import ConfigurationError
from runtime.tls import AUTHORITY_FILE, ZOOKEEPER_FILES, CertificateName

AUTHORITY_KEY_FILE: Final = "authority.key"
AUTHORITY_DAYS: Final = 3_650
CERTIFICATE_DAYS: Final = 365
_CLOCKS_DIFFER: Final = dt.timedelta(minutes=5)
"""A certificate counts from a little before it was made: other hosts' clocks may be behind."""


def make_authority(folder: Path, name: str = "Isthmus", days: float = AUTHORITY_DAYS) -> Path:
    """Make the authority's key and certificate; refuses to replace one that is there."""
    key_file, certificate_file = folder / AUTHORITY_KEY_FILE, folder / AUTHORITY_FILE
    for path in (key_file, certificate_file):
        if path.exists():
            raise ConfigurationError(
                f"{path} exists: choose another folder; a new authority would end trust in the old one"
            )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} authority")])
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(subject, subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_key(key_file, key)
    certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return certificate_file


def make_certificate(
    folder: Path, role: Role, name: str, hosts: Sequence[str] = (), days: float = CERTIFICATE_DAYS
) -> Path:
    """Make key and certificate of a node, signed by the authority in the same folder.

    `hosts` are names and addresses under which a broker's HTTPS is asked for.
    """
    try:
        check_name(role, name)
    except InvalidNameError as error:
        raise ConfigurationError(str(error)) from error
    identity = CertificateName(role, name)
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(str(identity))]
    names += [_general_name(host) for host in hosts]
    return _make(folder, identity.file_name, names, role is not Role.CLIENT, days)


def make_server_certificate(folder: Path, hosts: Sequence[str], days: float = CERTIFICATE_DAYS) -> Path:
    """Make key and certificate of the ZooKeeper servers that are reached by these names or addresses."""
    if not hosts:
        raise ConfigurationError("no host is given: name the hosts ZooKeeper is reached by")
    return _make(folder, ZOOKEEPER_FILES, [_general_name(host) for host in hosts], True, days)


def _make(folder: Path, files: str, names: Sequence[x509.GeneralName], serves: bool, days: float) -> Path:
    authority, authority_key = _load_authority(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, files)])
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if serves:
        usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
    certificate = (
        _builder(subject, authority.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
        )
        .sign(authority_key, hashes.SHA256())
    )
    _write_key(folder / f"{files}.key", key)
    path = folder / f"{files}.pem"
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return path


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    end = now + dt.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - _CLOCKS_DIFFER)
        .not_valid_after(end)
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _load_authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        certificate = x509.load_pem_x509_certificate((folder / AUTHORITY_FILE).read_bytes())
        key = serialization.load_pem_private_key((folder / AUTHORITY_KEY_FILE).read_bytes(), None)
    except OSError as error:
        raise ConfigurationError(
            f"{folder} has no authority ({error.strerror}): make one with `isthmus certs init {folder}`"
        ) from error
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"{folder}: the authority cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigurationError(f"{folder}: the authority's key is not one of `isthmus certs init`")
    return certificate, key


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """Nobody but the owner may read a key, from its first byte on."""
    data = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
