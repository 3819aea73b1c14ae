"""The server without processes and sockets: AsyncLLM's interface over an engine in this process, and ASGI calls."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from quire import LLMEngine, LoRARequest
from quire.common.errors import RequestFailedError
from quire.common.outputs import RequestOutput
from quire.common.params import PoolerInfo
from quire.engine.requests.input_processor import InputProcessor
from quire.interfaces.pooling import VECTORS, pooling_output, tokenized
from quire.server.app import make_app
from quire.server.config import ServerArgs
from quire.server.http.state import ServerState
from quire.server.models.pool import ModelPool
from quire.server.models.served_model import ServedModel
from quire.text.tokenizer.tokenizer import Tokenizer
from tests.scripted_engine import RecitingExecutor, scripted_llm


class Group:
    """As EngineGroup, of one engine."""

    def __init__(self, llm: "InProcessLLM") -> None:
        self._llm = llm
        self.engines = [llm]
        self.pids = [1]

    @property
    def stats(self) -> list[Any]:
        return [self._llm.stats()]

    @property
    def running(self) -> list[bool]:
        return [self._llm.death is None]


class InProcessLLM:
    """As AsyncLLM. The engine steps in the event loop while anybody waits for it, once between any two other things."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.model_config = engine.model_config
        self.adapters = engine.adapters
        self.death: Exception | None = None
        self.num_bytes = engine.plan.total_bytes
        self.default_sampling_params = engine.default_sampling_params
        self.group = Group(self)
        self._queues: dict[str, asyncio.Queue[RequestOutput | Exception]] = {}
        self._stepping: asyncio.Task[None] | None = None
        self.held: list[bool] = []
        """for each request, whether it would wait for an engine"""

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        return self.engine.add_lora(lora_request)

    async def remove_lora(self, lora_id: int | str) -> bool:
        return self.adapters.remove(lora_id)

    async def generate(
        self, prompt, params, request_id: str, *, lora_request=None, holds=False
    ) -> AsyncIterator[RequestOutput]:
        self.engine.add_request(request_id, prompt, params, lora_request=lora_request)
        self.held.append(holds)
        queue = self._queues[request_id] = asyncio.Queue()
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        try:
            while True:
                output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                yield output
                if output.finished:
                    return
        finally:
            del self._queues[request_id]
            self.engine.abort_request(request_id)

    @property
    def inputs(self) -> InputProcessor:
        return self.engine.inputs

    @property
    def pooler(self) -> PoolerInfo | None:
        return self.engine.pooler

    async def encode_many(self, prompts, params, request_ids: Sequence[str], *, lora_request=None):
        async def one(prompt, request_id: str):
            outputs = self.generate(prompt, params, request_id=request_id, lora_request=lora_request)
            return [pooling_output(output, *VECTORS) async for output in outputs][-1]

        return await asyncio.gather(*map(one, prompts, request_ids))

    async def pooling_prompts(self, given, params, *, add_special_tokens: bool = True):
        return tokenized(self.engine.inputs.pooling, given, params, add_special_tokens)

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens)

    async def _step(self) -> None:
        while self.engine.has_unfinished_requests():
            try:
                outputs = self.engine.step()
            except Exception as error:
                for queue in self._queues.values():
                    queue.put_nowait(error)
                return
            for output in outputs:
                if output.request_id in self._queues:
                    failed = output.error is not None and output.outputs[0].finish_reason == "abort"
                    told = RequestFailedError(output.error) if failed else output
                    self._queues[output.request_id].put_nowait(told)
            await asyncio.sleep(0)


class SayingExecutor(RecitingExecutor):
    """Says `reply` to everything, after each of `first_replies` was said once."""

    reply = "Hello!"
    first_replies: Sequence[str] = ()

    def _next_token(self, seq_id: int, num_tokens: int) -> int:
        prompt_len = self.prompt_lens.setdefault(seq_id, num_tokens)
        place = list(self.prompt_lens).index(seq_id)
        text = self.first_replies[place] if place < len(self.first_replies) else self.reply
        reply = [*self.tokenizer.encode(text), self.tokenizer.eos_token_id]
        return reply[(num_tokens - prompt_len) % len(reply)]


@dataclass
class Answer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_complete: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]

    @property
    def frames(self) -> list[str]:
        """Events and comments of a stream."""
        assert self.headers["content-type"].startswith("text/event-stream")
        assert self.body.endswith(b"\n\n")
        return self.body.decode()[:-2].split("\n\n")

    @property
    def events(self) -> list[Any]:
        """The data of a stream that ended as it should."""
        data = [frame.removeprefix("data: ") for frame in self.frames if not frame.startswith(":")]
        assert data[-1] == "[DONE]"
        return [json.loads(item) for item in data[:-1]]


@dataclass
class Server:
    """An application to be called."""

    state: ServerState
    executor: Any = None

    def __post_init__(self) -> None:
        self.app = make_app(self.state)

    @property
    def model(self) -> ServedModel:
        return self.state.models.entries[0].served

    @property
    def llm(self) -> Any:
        return self.model.llm

    @property
    def engine(self) -> LLMEngine:
        return self.llm.engine

    def post(self, path: str, body: Any, **kwargs: Any) -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.call("POST", path, raw, **kwargs)

    def get(self, path: str, **kwargs: Any) -> Answer:
        return self.call("GET", path, **kwargs)

    def call(self, method: str, path: str, body: bytes = b"", **kwargs: Any) -> Answer:
        return asyncio.run(self.request(method, path, body, **kwargs))

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        vanish_after: int | None = None,
    ) -> Answer:
        """One HTTP request; the client goes away after `vanish_after` messages of the answer, 0: at once."""
        answer, gone = Answer(), asyncio.Event()
        if vanish_after == 0:
            gone.set()
        incoming = [{"type": "http.request", "body": body, "more_body": False}]
        num_sent = 0

        async def receive() -> dict[str, Any]:
            if incoming:
                return incoming.pop(0)
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            nonlocal num_sent
            if gone.is_set():
                return
            num_sent += 1
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                answer.body += message.get("body", b"")
                answer.is_complete = not message.get("more_body", False)
            if answer.is_complete or num_sent == vanish_after:
                gone.set()

        given = {"content-type": "application/json", "host": "localhost"} | (headers or {})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path.partition("?")[0],
            "raw_path": path.encode(),
            "query_string": path.partition("?")[2].encode(),
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("localhost", 80),
            "state": {},
        }
        await self.app(scope, receive, send)
        return answer


def serve(engine: LLMEngine, executor: Any = None, *, args: ServerArgs | None = None, **state: Any) -> Server:
    """An application over this engine."""
    llm: Any = InProcessLLM(engine)
    made = Server(state_over(llm, "quire-tiny", "alias", args=args), executor)
    for name, value in state.items():
        setattr(made.state if hasattr(made.state, name) else made.model, name, value)
    return made


def state_over(llm: Any, *names: str, args: ServerArgs | None = None) -> ServerState:
    """A server's state with one model, which is loaded."""
    args = args or ServerArgs()
    return ServerState(models=ModelPool.of(llm, names, args), args=args)


def saying(
    reply: str = "Hello!", first_replies: Sequence[str] = (), speculation: dict[str, Any] | None = None, **kwargs: Any
) -> Server:
    """An application over a model that says `reply` to everything, after each of `first_replies` was said once."""
    llm, executor = scripted_llm(speculative_config=speculation or {"method": "off"})
    said = SayingExecutor(executor.tokenizer)
    said.reply, said.first_replies = reply, first_replies
    llm.engine.executor = said
    return serve(llm.engine, said, **kwargs)


def tokenizer_of(server: Server) -> Tokenizer:
    return server.llm.tokenizer


def hold(server: Server) -> asyncio.Event:
    """From now on, answers stop after three tokens, until the event that is returned is set."""
    gate, generate = asyncio.Event(), server.llm.generate

    async def held(*args: Any, **kwargs: Any) -> AsyncIterator[RequestOutput]:
        num_outputs = 0
        async with aclosing(generate(*args, **kwargs)) as outputs:
            async for output in outputs:
                yield output
                num_outputs += 1
                if num_outputs == 3:
                    await gate.wait()

    server.llm.generate = held
    return gate
