"""Passwords and tokens, in addresses and in keys called so: masked wherever they are kept or shown."""

import re
from urllib.parse import unquote

from raysim.core.plain import Plain

MASK = "***"
_DATABASES = ("postgresql", "postgres", "mysql", "mariadb", "mssql", "oracle")
_WEB = ("http", "https")  # where a login without a colon is a token; elsewhere it is the name of a user or a place
_SECRET = r"password|passwd|pwd|token|secret|api_?key|access_?key|secret_?key|account_?key|credentials?"
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30})://(\S+)")  # bounded, so that long words cost no more than others
_WHOLE_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.+)", re.DOTALL)  # alone, it may hold spaces
_PARAMETER = re.compile(
    r"([?&;#][^=&#\s]*(?:pass|pwd|token|secret|key|sig|auth|credential|odbc)[^=&#\s]*=)"
    r"(?!\*\*\*)[^&#\s]+?(?=['\")\]};:,.]*(?:[&#\s]|$))",  # without the end of a sentence around it
    re.IGNORECASE,
)
_VALUE = (  # in quotes, a whole mapping or list, or up to the end of a word, without the colon behind it
    r"(?!['\"]?\*\*\*)(?:'[^'\n]+'|\"[^\"\n]+\"|\{[^}\n]*\}|\[[^\]\n]*\]|['\"]?[^\s,;&'\")}]*[^\s,;&'\")}:])"
)
_ASSIGNMENT = re.compile(rf"((?:{_SECRET})\s*=\s*){_VALUE}", re.IGNORECASE)
_ENTRY = re.compile(  # of a mapping, as YAML, JSON or Python writes it
    rf"((?:^|[{{,])\s*(['\"]?)(?:[\w.-]*[_.-])?(?:{_SECRET})\2\s*:\s+){_VALUE}", re.IGNORECASE | re.MULTILINE
)
_HEADER = re.compile(  # what follows is a token where it has a digit or is longer than words are
    r"(\b(?:bearer|authorization['\"]?\s*[:=]\s*['\"]?(?:basic|token))\s+)(?=[^\s'\",;]*\d|[^\s'\",;]{20})[^\s'\",;]{8,}",
    re.IGNORECASE,
)
_SECRET_KEY = re.compile(rf"(?:^|[\W_])(?:{_SECRET})$", re.IGNORECASE)
_PASSWORD_KEY = re.compile(r"(?:^|[\W_])(?:password|passwd|pwd)$", re.IGNORECASE)  # a number under it is one, too


def without_secrets(text: str, address: str = "") -> str:
    """A text with the logins, passwords and tokens of the addresses in it, and of what is called so, masked as `***`.

    `https://TOKEN@host`, `s3://KEY:SECRET@bucket`, `https://host?token=T`, `password=P`, `{password: P}` and
    `Authorization: Bearer T` lose what is secret; in the address of a database, the name of the user stays.  A
    password in an address may hold any character, so a login reaches to the last @ of its word.  Masking twice
    changes nothing.
    address: whose secrets are masked wherever they stand in the text, as a library's message may take it apart.
    """
    for secret in _secrets_of(address):
        text = text.replace(secret, MASK)
    text = _ASSIGNMENT.sub(rf"\1{MASK}", _ADDRESS.sub(_masked, text))
    return _HEADER.sub(rf"\1{MASK}", _ENTRY.sub(rf"\1{MASK}", text))


def plain_without_secrets(value: Plain) -> Plain:
    """A copy of plain data: every text through `without_secrets`, texts under a key such as `token` masked whole.

    So is a number under `password`, but not one under `token`, which may count something.
    """
    if isinstance(value, str):
        return _WHOLE_ADDRESS.sub(_masked, value) if _WHOLE_ADDRESS.fullmatch(value) else without_secrets(value)
    if isinstance(value, dict):
        return {
            key: MASK if _is_secret(key, inner) else plain_without_secrets(inner) for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain_without_secrets(inner) for inner in value]
    return value


def _is_secret(key: str, value: Plain) -> bool:
    if isinstance(value, str):
        return bool(value and _SECRET_KEY.search(key))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and bool(_PASSWORD_KEY.search(key))


def is_masked(value: Plain) -> bool:
    """Whether a value of a configuration is what masking has left of it, so that it cannot be used."""
    return isinstance(value, str) and (value == MASK or ("://" in value and MASK in value))


def _secrets_of(address: str) -> list[str]:
    """What masking takes out of an address, also as it is decoded, and a password without its user; the longest first.

    Without what is shorter than 4 characters, which would be found everywhere.
    """
    kept = _WHOLE_ADDRESS.sub(_masked, address).split(MASK)
    found = re.fullmatch("(.+?)".join(map(re.escape, kept)), address, re.DOTALL)
    parts = [part for whole in (found.groups() if found else ()) for part in (whole, whole.partition(":")[2])]
    return sorted({one for part in parts for one in (part, unquote(part)) if len(one) > 3}, key=len, reverse=True)


def _masked(found: re.Match[str]) -> str:
    scheme, rest = found[1], found[2]
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    login, at, place = rest.rpartition("@")
    name, colon, _ = login.partition(":")
    if at and ":" in host:
        is_database = colon and scheme.lower().partition("+")[0] in _DATABASES
        rest = f"{name}:{MASK}@{place}" if is_database else f"{MASK}@{place}"
    elif at and "@" in host and scheme.lower() in _WEB:
        rest = f"{MASK}@{place}"
    return f"{scheme}://" + _PARAMETER.sub(rf"\1{MASK}", rest)
