"""The key that ``wandb login`` stored, found without asking wandb, which uses the network."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

# The service answers at two addresses, and a key for either opens both.
SERVICE_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")


def key_from_netrc(base_url: str) -> str | None:
    """Return the key stored for the service at `base_url`; None where there is none."""
    names = [os.environ.get("NETRC"), "~/.netrc", "~/_netrc"]
    paths = [Path(name).expanduser() for name in names if name]
    host = urlsplit(base_url).netloc
    hosts = SERVICE_HOSTS if host in SERVICE_HOSTS else (host,)
    for path in paths:
        try:
            logins = netrc.netrc(path)
        except (OSError, netrc.NetrcParseError):
            continue
        for host in hosts:
            login = logins.authenticators(host)
            if login is not None and login[2]:
                return login[2]
    return None
