"""Rules on what a turn appends. Knows no tokenizer and no template."""

from pagecast.v1 import session_pb2
from service.errors import PagecastError, Reason


def check_input(value: session_pb2.Input, path: str = "input") -> None:
    """Refuse an input that is present and holds nothing, and messages of no role."""
    match value.WhichOneof("content"):
        case None:
            raise _empty(path)
        case "text":
            if not value.text:
                raise _empty(f"{path}.text")
        case "token_ids":
            if not value.token_ids.ids:
                raise _empty(f"{path}.token_ids.ids")
        case "messages":
            if not value.messages.messages:
                raise _empty(f"{path}.messages.messages")
            for index, message in enumerate(value.messages.messages):
                item = f"{path}.messages.messages[{index}]"
                if message.role == session_pb2.ROLE_UNSPECIFIED:
                    raise PagecastError(
                        Reason.FIELD_REQUIRED, f"{item}.role is required", field=f"{item}.role"
                    )
                # An empty system message is an answer to the template's own; an empty question is none.
                if message.role == session_pb2.ROLE_USER and not message.content:
                    raise _empty(f"{item}.content")


def _empty(path: str) -> PagecastError:
    return PagecastError(Reason.INPUT_EMPTY, f"{path} is empty: there is nothing to append", field=path)
