"""`aerie keys`: make, list and revoke API keys, and renew the checksum of their file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from app.admission import key_file
from app.admission.tenants import Tenant, parse_in_force
from app.errors import SettingsError
from app.settings import ENV_PREFIX

_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent", "max_k", "priority")


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run one subcommand. Raises SettingsError for what cannot be done."""
    options = _parser(environ).parse_args(arguments)
    if options.keys_file is None:
        raise SettingsError("keys_file", "name the file: --keys-file FILE")
    path = Path(options.keys_file)
    if options.action == "create":
        _create(path, options)
    elif options.action == "revoke":
        key_file.revoke(path, options.id)
        print(f"revoked {options.id}")
    elif options.action == "checksum":
        key_file.renew_checksum(path)
    else:
        _list(path)
    return 0


def _create(path: Path, options: argparse.Namespace) -> None:
    limits: dict[str, object] = {
        name: getattr(options, name) for name in _LIMITS if getattr(options, name) is not None
    }
    if options.models:
        limits["models"] = options.models
    key_id, secret = key_file.create(
        path, options.tenant, limits, admin=options.admin, now=datetime.now(UTC)
    )
    print(f"key {key_id} of tenant {options.tenant}, shown this once:")
    print(secret)


def _list(path: Path) -> None:
    """Print the keys of a file. Raises SettingsError for one that a gateway does not accept."""
    try:
        ring = parse_in_force(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError("keys_file", f"{path}: {error}") from None
    for key in ring.keys:
        created = key.created.isoformat() if key.created else "-"
        words = [key.id, key.tenant, created, "admin" if key.admin else "-"]
        print(" ".join([*words, _limits(ring.tenants[key.tenant])]))


def _limits(tenant: Tenant) -> str:
    limits = tenant.model_dump(exclude={"name"}, exclude_defaults=True)
    return " ".join(f"{name}={value}" for name, value in limits.items()) or "unlimited"


def _parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aerie keys", description=__doc__, allow_abbrev=False)
    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    common.add_argument(
        "--keys-file",
        metavar="FILE",
        default=environ.get(f"{ENV_PREFIX}KEYS_FILE"),
        help=f"the keys file [{ENV_PREFIX}KEYS_FILE]",
    )
    actions = parser.add_subparsers(dest="action", required=True)
    create = actions.add_parser(
        "create", parents=[common], help="make a key and print it", allow_abbrev=False
    )
    create.add_argument("tenant", help="the key's tenant; a new one gets the limits below")
    create.add_argument("--admin", action="store_true", help="may also use the admin routes")
    for name in _LIMITS:
        create.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N")
    create.add_argument(
        "--models", action="append", metavar="MODEL", help="a model that it may use; repeatable"
    )
    actions.add_parser(
        "list", parents=[common], help="list ids, tenants and limits", allow_abbrev=False
    )
    revoke = actions.add_parser("revoke", parents=[common], help="remove a key", allow_abbrev=False)
    revoke.add_argument("id", help="the key's id, as `list` shows it")
    actions.add_parser(
        "checksum",
        parents=[common],
        help="accept the file as it is, after a change by hand",
        allow_abbrev=False,
    )
    return parser
