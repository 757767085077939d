"""Sessions a page at a time, newest first, as their workers see them now.

Knows the router and the workers' BatchGetSessions; does not know who asks.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Sequence

from pagecast.v1 import session_pb2
from pagecast.worker.v1 import worker_pb2
from service.errors import PagecastError, Reason
from service.pool.link import WorkerLink
from service.router import Router

# A worker that takes longer is shown as it was last seen.
READ_TIMEOUT_S = 3.0
_SEQUENCE_BYTES = 8
_TAG_BYTES = 8


class SessionPages:
    """Reads pages of sessions.

    A page token is the sequence number of the page's last session under a key of this gateway's
    life, since numbers start anew with the gateway.
    """

    def __init__(self, router: Router[WorkerLink]) -> None:
        self._router = router
        self._key = secrets.token_bytes(16)

    async def read(self, size: int, token: str) -> tuple[list[session_pb2.Session], str]:
        """Read at most `size` sessions from where `token` left off ("": the newest).

        Returns:
            The sessions, and the token of the next page, "" where there is none. Sessions that close
            meanwhile are left out; a page is empty only where all that follows are.

        Raises:
            PagecastError: FIELD_INVALID `page_token`.
        """
        before = self._decode(token) if token else None
        while True:
            rows = self._router.page(before, size)
            sessions = await self._read([session_id for _, session_id in rows])
            if not rows:
                return sessions, ""
            before = rows[-1][0]
            if not self._router.page(before, 1):
                return sessions, ""
            if sessions:
                return sessions, self._encode(before)

    async def _read(self, session_ids: Sequence[str]) -> list[session_pb2.Session]:
        """Read sessions of any workers, every worker once and all at the same time; keeps the order."""
        ids_of: dict[WorkerLink, list[str]] = {}
        found: dict[str, session_pb2.Session] = {}
        for session_id in session_ids:
            failed = self._router.failed(session_id)
            if failed is not None:
                found[session_id] = failed
            else:
                ids_of.setdefault(self._router.find(session_id), []).append(session_id)
        for sessions in await asyncio.gather(*(self._ask(link, ids) for link, ids in ids_of.items())):
            found.update((session.session_id, session) for session in sessions)
        return [found[session_id] for session_id in session_ids if session_id in found]

    async def _ask(self, link: WorkerLink, session_ids: Sequence[str]) -> Sequence[session_pb2.Session]:
        wire = worker_pb2.BatchGetSessionsRequest(session_ids=session_ids)
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                response = await link.call(link.stub.BatchGetSessions, wire)
        except (PagecastError, TimeoutError):
            # Lost just now, or too busy to answer: what was last seen of them is known here.
            seen = (self._router.failed(each) or self._router.snapshot(each) for each in session_ids)
            return [session for session in seen if session is not None]
        for session in response.sessions:
            self._router.remember(session)
        return response.sessions

    def _encode(self, sequence: int) -> str:
        body = sequence.to_bytes(_SEQUENCE_BYTES)
        return base64.urlsafe_b64encode(body + self._tag(body)).decode("ascii").rstrip("=")

    def _decode(self, token: str) -> int:
        try:
            data = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise _wrong_token() from None
        body, tag = data[:_SEQUENCE_BYTES], data[_SEQUENCE_BYTES:]
        if not hmac.compare_digest(tag, self._tag(body)):
            raise _wrong_token()
        return int.from_bytes(body)

    def _tag(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, hashlib.sha256)[:_TAG_BYTES]


def _wrong_token() -> PagecastError:
    return PagecastError(
        Reason.FIELD_INVALID, "page_token is none that this gateway gave out", field="page_token"
    )
