"""How a request gets its model: once, in its handler, until its response has been sent."""

from starlette.requests import Request

from quire.server.http.sse import unless_disconnected
from quire.server.http.state import context_of, state_of
from quire.server.models.served_model import ServedModel


async def use_model(request: Request, name: str | None) -> ServedModel:
    """The model of this name, with the adapter if it is one's, or the first one for None; loaded first if it is not.

    It stays awake until the response was sent and the request's background response has ended. The name is noted in the
    request's context. The request's body must have been read. Raises ApiError: 404 for a model that is not served, 503
    for one that cannot be loaded now.
    """
    pool, context = state_of(request).models, context_of(request)
    entry = pool.find(name)
    context.model, context.base_model = name or entry.name, entry.name
    pool.begin_use(entry)
    context.at_end.callback(pool.end_use, entry)
    loading = pool.ready(entry)
    model = await (loading if entry.is_awake else unless_disconnected(request, loading))
    if name is None or entry.spec.has_name(name):
        return model
    adapters = model.llm.adapters
    adapter = adapters.get(name) or adapters.get(name.removesuffix(":latest"))
    if adapter is None:  # unloaded while the model was loaded
        raise pool.not_found(name)
    return model.with_adapter(adapter)
