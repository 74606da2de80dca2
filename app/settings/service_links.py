"""Variables that Kubernetes writes into a pod for each Service of its namespace.

For a Service named `vllm` these are VLLM_PORT=tcp://10.0.0.1:80, VLLM_SERVICE_HOST and others. To
vLLM VLLM_PORT is a number and the others are mistakes; to this gateway those of a Service named
`aerie` would be unknown settings.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping

_SERVICE_LINK = re.compile(
    r"_SERVICE_(HOST|PORT(_[A-Z0-9_]+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$"
)
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
# Prefixes of variables of which every one is read, here or by vLLM.
_READ = ("AERIE_", "VLLM_", "SM_VLLM_", "SAGEMAKER_")


def is_service_link(key: str, text: str) -> bool:
    """Whether Kubernetes wrote the variable, for a Service of any name."""
    return _SERVICE_LINK.search(key) is not None or _is_address(key, text)


def drop_service_links(environ: MutableMapping[str, str]) -> list[str]:
    """Remove those that something would read as a setting; returns names of this gateway and vLLM.

    Addresses under `..._PORT` go whatever their prefix: other libraries expect numbers too.
    """
    dropped = [key for key, text in environ.items() if _is_misread(key, text)]
    for key in dropped:
        del environ[key]
    return sorted(key for key in dropped if key.startswith(_READ))


def _is_misread(key: str, text: str) -> bool:
    return _is_address(key, text) or (key.startswith(_READ) and is_service_link(key, text))


def _is_address(key: str, text: str) -> bool:
    return key.endswith("_PORT") and _SERVICE_ADDRESS.match(text) is not None
