"""A worker takes no more sessions in REPLAN: what the gateway makes of it."""

from google.rpc import error_details_pb2

from pagecast.v1 import session_pb2
from pagecast.worker.v1 import worker_pb2
from tests.service.conftest import Gateway, MakeGateway, failure


def no_replan_place(limit: int) -> worker_pb2.Refusal:
    return worker_pb2.Refusal(
        reason="QUOTA_EXCEEDED",
        field="decode_plan",
        message="no place",
        metadata={"max_replan_sessions": str(limit)},
    )


async def test_an_open_goes_on_to_another_worker_when_one_takes_no_more_of_its_mode(
    make_gateway: MakeGateway,
) -> None:
    gateway = await make_gateway(2)
    first, second = gateway.workers
    first.refusals["OpenSession"] = no_replan_place(1)
    session_id = await gateway.open()
    assert list(second.sessions) == [session_id]
    assert first.sessions == {}
    second.refusals["OpenSession"] = no_replan_place(2)
    status, reason, metadata, whole = await failure(gateway.open())
    assert (status, reason) == ("RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED")
    assert metadata["field"] == "decode_plan"
    assert metadata["max_replan_sessions"] in {"1", "2"}
    quota = error_details_pb2.QuotaFailure()
    assert whole.details[1].Unpack(quota)
    assert [(each.subject, each.description) for each in quota.violations] == [("sessions", "no place")]
    assert [gateway.router._num_sessions[id(link)] for link in gateway.links] == [0, 1]
    del first.refusals["OpenSession"]
    assert await gateway.open() in first.sessions


async def test_a_refused_change_of_mode_is_told(gateway: Gateway) -> None:
    session_id = await gateway.open()
    gateway.worker.refusals["UpdateSession"] = no_replan_place(32)
    request = session_pb2.UpdateSessionRequest(
        session_id=session_id, decode_plan=session_pb2.PAGED_DECODE_PLAN_REPLAN
    )
    status, reason, metadata, _ = await failure(gateway.sessions.UpdateSession(request))
    assert (status, reason) == ("RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED")
    assert metadata == {"field": "decode_plan", "max_replan_sessions": "32"}
