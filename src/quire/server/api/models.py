"""/v1/models: the model that is served, under each of its names."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from quire.server.api.tokens.protocol import ModelCard, ModelList
from quire.server.http.endpoint import Endpoint, json_response
from quire.server.http.state import ServerState, state_of


async def list_models(request: Request) -> ASGIApp:
    """GET /v1/models"""
    state = state_of(request)
    return json_response(ModelList(data=[_card(state, name) for name in state.model_names]))


async def retrieve_model(request: Request) -> ASGIApp:
    """GET /v1/models/{model}"""
    state = state_of(request)
    return json_response(_card(state, state.check_model(request.path_params["model"])))


def _card(state: ServerState, name: str) -> ModelCard:
    model = state.llm.model_config
    return ModelCard(id=name, created=int(state.started), root=model.model, max_model_len=model.max_model_len)


ENDPOINTS = (
    Endpoint("/v1/models", "GET", list_models, "List the models that are served", response=ModelList),
    Endpoint("/v1/models/{model:path}", "GET", retrieve_model, "Describe a model that is served", response=ModelCard),
)
