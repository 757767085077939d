"""Every rule on a request that needs neither tokenizer nor session; `requests` has one check per RPC.

Knows the public messages. Does not know sessions, models or workers: what depends on them
(vocabulary, template, context, revision) the worker checks. Each `check_*` returns None or
raises `PagecastError` naming the field; nothing has changed by then.
"""

from service.validate.requests import (
    check_append_input,
    check_cancel_generation,
    check_close_session,
    check_detokenize,
    check_generate,
    check_get_model,
    check_get_session,
    check_list_sessions,
    check_open_session,
    check_tokenize,
    check_update_session,
    not_implemented,
)

__all__ = [
    "check_append_input",
    "check_cancel_generation",
    "check_close_session",
    "check_detokenize",
    "check_generate",
    "check_get_model",
    "check_get_session",
    "check_list_sessions",
    "check_open_session",
    "check_tokenize",
    "check_update_session",
    "not_implemented",
]
