"""/v1/models: the models that are served, under each of their names; in the form of OpenAI's or of Anthropic's API."""

from starlette.requests import Request
from starlette.types import ASGIApp

from quire.server.api.ollama.stream import rfc3339
from quire.server.api.tokens.protocol import AnthropicModelCard, AnthropicModelList, ModelCard, ModelList
from quire.server.http.endpoint import Endpoint, json_response
from quire.server.http.state import ServerState, state_of


async def list_models(request: Request) -> ASGIApp:
    """GET /v1/models"""
    state = state_of(request)
    names = [name for entry in state.models.entries for name in (*entry.spec.names, *entry.adapter_names)]
    if "anthropic-version" in request.headers:
        models = [_anthropic_card(state, name) for name in names]
        return json_response(AnthropicModelList(data=models, first_id=models[0].id, last_id=models[-1].id))
    return json_response(ModelList(data=[_card(state, name) for name in names]))


async def retrieve_model(request: Request) -> ASGIApp:
    """GET /v1/models/{model}"""
    state, name = state_of(request), request.path_params["model"]
    state.models.find(name)
    return json_response((_anthropic_card if "anthropic-version" in request.headers else _card)(state, name))


def _card(state: ServerState, name: str) -> ModelCard:
    entry = state.models.find(name)
    max_model_len = None if entry.llm is None else entry.llm.model_config.max_model_len
    card = ModelCard(
        id=name,
        created=int(state.started),
        root=entry.spec.checkpoint,
        max_model_len=max_model_len,
        status=entry.status,
        num_engines=entry.spec.engine.data_parallel_size,
    )
    if name in entry.adapter_names:
        adapter = None if entry.llm is None else entry.llm.adapters.get(name)
        card.parent = entry.name if adapter is None else adapter.base_model_name or entry.name
        card.root = card.root if adapter is None else adapter.folder
    return card


def _anthropic_card(state: ServerState, name: str) -> AnthropicModelCard:
    created, entry = rfc3339(int(state.started)), state.models.find(name)
    max_model_len = None if entry.llm is None else entry.llm.model_config.max_model_len
    return AnthropicModelCard(id=name, display_name=name, created_at=created, max_input_tokens=max_model_len)


ENDPOINTS = (
    Endpoint("/v1/models", "GET", list_models, "List the models that are served", response=ModelList),
    Endpoint("/v1/models/{model:path}", "GET", retrieve_model, "Describe a model that is served", response=ModelCard),
)
