"""Opaque ids: a prefix and 128 random bits in base32. Knows nothing of what they name."""

import base64
import re
import secrets

_BODY = r"[a-z2-7]{26}"
SESSION_ID = re.compile(f"ses_{_BODY}")
GENERATION_ID = re.compile(f"gen_{_BODY}")


def new_session_id() -> str:
    """Draw a session id: `ses_` and 26 characters."""
    return "ses_" + _random_base32()


def new_generation_id() -> str:
    """Draw a generation id: `gen_` and 26 characters."""
    return "gen_" + _random_base32()


def _random_base32() -> str:
    return base64.b32encode(secrets.token_bytes(16)).decode("ascii").rstrip("=").lower()
