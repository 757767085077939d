"""`pagecast sessions …` and `pagecast models`: what is there on a server."""

import sys

import click

from service.cli.options import JSON, TARGET, has_text
from service.cli.running import client_of, output, tell_error
from service.commands.models import models as list_models
from service.commands.sessions import close_sessions, get_session, list_sessions


@click.command()
@TARGET
@JSON
def models(target: str | None, *, as_json: bool) -> None:
    """List the models that sessions can be opened on; fails where there is none."""
    out = output(as_json=as_json)
    with client_of(target) as client:
        list_models(client, out, as_json=as_json)


@click.group()
def sessions() -> None:
    """List, look at and close sessions."""


@sessions.command("list")
@TARGET
@JSON
@click.option("--limit", type=click.IntRange(1), metavar="N", help="At most N sessions.")
def list_(target: str | None, limit: int | None, *, as_json: bool) -> None:
    """List sessions, newest first."""
    out = output(as_json=as_json)
    with client_of(target) as client:
        list_sessions(client, out, limit, as_json=as_json)


@sessions.command()
@click.argument("session_id", metavar="ID", callback=has_text)
@TARGET
@JSON
def get(target: str | None, session_id: str, *, as_json: bool) -> None:
    """Show a session."""
    out = output(as_json=as_json)
    with client_of(target) as client:
        get_session(client, session_id, out, as_json=as_json)


@sessions.command()
@click.argument("session_ids", metavar="ID...", nargs=-1, required=True, callback=has_text)
@TARGET
def close(target: str | None, session_ids: tuple[str, ...]) -> None:
    """Close sessions and print the ids of those closed; fails where one could not be."""
    out = output()
    with client_of(target) as client:
        refused = close_sessions(client, session_ids, out)
    for session_id, error in refused.items():
        tell_error(f"{session_id}: {error}")
    sys.exit(1 if refused else 0)
