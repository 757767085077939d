import pytest

from pagecast.v1 import model_pb2, session_pb2
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


@pytest.mark.parametrize("name", ["Tokenize", "Detokenize"])
async def test_rpcs_of_later_versions_say_so(gateway: Gateway, name: str) -> None:
    request = getattr(model_pb2, f"{name}Request")()
    status, reason, metadata, _ = await failure(getattr(gateway.models, name)(request))
    assert (status, reason, metadata) == ("UNIMPLEMENTED", "NOT_IMPLEMENTED", {"rpc": name})
