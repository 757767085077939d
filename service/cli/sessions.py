"""`pagecast sessions …` and `pagecast models`: what is there on a server."""

import sys

import click

from service.cli.options import JSON, LABEL, PLAN_CHOICE, TARGET, has_text
from service.cli.running import client_of, output, tell_error
from service.commands.models import models as list_models
from service.commands.replies import PLANS
from service.commands.sessions import close_sessions, get_session, list_sessions, update_session


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
    """List, look at, change and close sessions."""


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


# No variables: PAGECAST_PLAN is about what is opened, and must not switch a session that is named for
# something else.
@sessions.command()
@click.argument("session_id", metavar="ID", callback=has_text)
@TARGET
@JSON
@click.option("--plan", type=PLAN_CHOICE, metavar="[once|replan]", help="Plan mode, from the next step on.")
@click.option(
    "--priority",
    type=click.IntRange(-(2**31), 2**31 - 1),
    metavar="N",
    help="Of turns that name none; higher runs first.",
)
@LABEL
def update(
    target: str | None,
    session_id: str,
    plan: str | None,
    priority: int | None,
    labels: dict[str, str],
    *,
    as_json: bool,
) -> None:
    """Change what is given of a session, also while it replies, and show the session."""
    if plan is None and priority is None and not labels:
        raise click.UsageError("Nothing to change: give --plan, --priority or --label.")
    out = output(as_json=as_json)
    with client_of(target) as client:
        update_session(
            client, session_id, out, PLANS[plan] if plan else None, priority, labels, as_json=as_json
        )


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
