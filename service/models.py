"""ModelService: what the workers serve. Knows no model file."""

from pagecast.v1 import model_pb2, model_pb2_grpc
from service.pool.link import WorkerLink
from service.router import Router
from service.validate import check_get_model, not_implemented


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """Answers from what the workers said of themselves."""

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
        """Refuse: not in this version."""
        raise not_implemented("Tokenize")

    async def Detokenize(
        self, request: model_pb2.DetokenizeRequest, context: object
    ) -> model_pb2.DetokenizeResponse:
        """Refuse: not in this version."""
        raise not_implemented("Detokenize")
