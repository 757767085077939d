from typing import Any

import pytest

from pagecast.v1 import model_pb2, session_pb2
from pagecast.worker.v1 import worker_pb2
from tests.service.conftest import Gateway, MakeGateway, failure


async def test_models_are_listed_once(make_gateway: MakeGateway) -> None:
    gateway = await make_gateway(2)
    response = await gateway.models.ListModels(model_pb2.ListModelsRequest())
    assert list(response.models) == [gateway.worker.info.model]


async def test_get_model(gateway: Gateway) -> None:
    response = await gateway.models.GetModel(model_pb2.GetModelRequest(model="tiny"))
    assert response.model == gateway.worker.info.model


async def test_an_unknown_model_is_not_found(gateway: Gateway) -> None:
    calls = [
        gateway.models.GetModel(model_pb2.GetModelRequest(model="huge")),
        gateway.sessions.OpenSession(session_pb2.OpenSessionRequest(model="huge")),
    ]
    for call in calls:
        status, reason, metadata, _ = await failure(call)
        assert (status, reason) == ("NOT_FOUND", "MODEL_NOT_FOUND")
        assert metadata == {"field": "model", "model": "huge"}


async def test_tokenize_and_detokenize_ask_a_worker(gateway: Gateway) -> None:
    request = model_pb2.TokenizeRequest(model="tiny", input=session_pb2.Input(text="hi"))
    ids = (await gateway.models.Tokenize(request)).token_ids
    assert list(ids) == [104, 105]
    text = (await gateway.models.Detokenize(model_pb2.DetokenizeRequest(model="tiny", token_ids=ids))).text
    assert text == "hi"


async def test_a_tokenizer_survives_all_but_one_worker(make_gateway: MakeGateway) -> None:
    gateway = await make_gateway(2)
    gateway.links[0].lost.set()
    request = model_pb2.DetokenizeRequest(model="tiny", token_ids=[104])
    assert (await gateway.models.Detokenize(request)).text == "h"
    gateway.links[1].lost.set()
    status, reason, _, _ = await failure(gateway.models.Detokenize(request))
    assert (status, reason) == ("UNAVAILABLE", "NO_WORKER")


async def test_what_the_tokenizer_refuses_is_told_with_its_field(gateway: Gateway) -> None:
    refusal = worker_pb2.Refusal(reason="FIELD_OUT_OF_RANGE", field="token_ids[0]", message="no such id")
    gateway.worker.refusals["Detokenize"] = refusal
    call = gateway.models.Detokenize(model_pb2.DetokenizeRequest(model="tiny", token_ids=[99]))
    status, reason, metadata, _ = await failure(call)
    assert (status, reason, metadata) == (
        "INVALID_ARGUMENT", "FIELD_OUT_OF_RANGE", {"field": "token_ids[0]"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("request_", "reason", "field"),
    [
        (model_pb2.TokenizeRequest(), "FIELD_REQUIRED", "model"),
        (model_pb2.TokenizeRequest(model="tiny"), "FIELD_REQUIRED", "input"),
        (model_pb2.TokenizeRequest(model="tiny", input=session_pb2.Input()), "INPUT_EMPTY", "input"),
        (model_pb2.DetokenizeRequest(), "FIELD_REQUIRED", "model"),
    ],
)
async def test_bad_requests_name_the_field(gateway: Gateway, request_: Any, reason: str, field: str) -> None:
    name = type(request_).__name__.removesuffix("Request")
    status, told, metadata, _ = await failure(getattr(gateway.models, name)(request_))
    assert (status, told, metadata["field"]) == ("INVALID_ARGUMENT", reason, field)
