"""ModelService: what the workers serve, and their tokenizers. Knows no model file."""

from pagecast.v1 import model_pb2, model_pb2_grpc
from pagecast.worker.v1 import worker_pb2
from service.pool.link import WorkerLink
from service.router import Router
from service.validate import check_detokenize, check_get_model, check_tokenize


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """Answers from what the workers said of themselves, and through any worker of the model."""

    def __init__(self, router: Router[WorkerLink]) -> None:
        self._router = router

    async def ListModels(
        self, request: model_pb2.ListModelsRequest, context: object
    ) -> model_pb2.ListModelsResponse:
        """List the models of live workers."""
        del request, context
        return model_pb2.ListModelsResponse(models=self._router.models())

    async def GetModel(
        self, request: model_pb2.GetModelRequest, context: object
    ) -> model_pb2.GetModelResponse:
        """Read one model."""
        del context
        check_get_model(request)
        return model_pb2.GetModelResponse(model=self._router.model(request.model))

    async def Tokenize(
        self, request: model_pb2.TokenizeRequest, context: object
    ) -> model_pb2.TokenizeResponse:
        """Turn an input into the ids that a fresh session's log would hold."""
        del context
        check_tokenize(request)
        link = self._router.link_of_model(request.model)
        response = await link.call(link.stub.Tokenize, worker_pb2.TokenizeRequest(input=request.input))
        return model_pb2.TokenizeResponse(token_ids=response.token_ids)

    async def Detokenize(
        self, request: model_pb2.DetokenizeRequest, context: object
    ) -> model_pb2.DetokenizeResponse:
        """Turn ids into text."""
        del context
        check_detokenize(request)
        link = self._router.link_of_model(request.model)
        wire = worker_pb2.DetokenizeRequest(token_ids=request.token_ids)
        response = await link.call(link.stub.Detokenize, wire)
        return model_pb2.DetokenizeResponse(text=response.text)
