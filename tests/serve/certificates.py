"""A certificate for 127.0.0.1 that nobody else trusts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


def make(folder: Path) -> tuple[Path, Path]:
    """Its file, and its key's."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2", "-nodes"]
    files = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-keyout", key, "-out", cert]
    try:
        subprocess.run(["openssl", "req", "-x509", *files, *subject], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs the openssl program, to make a certificate")
    return cert, key
