"""/v1/responses that take a while: in the background, cancelled, deleted, or left by their clients."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.server.api.responses.endpoint import stored_responses
from quire.server.api.responses.store import StoredResponse
from quire.server.config import ServerArgs
from quire.server.operations.lifecycle import DrainGate
from quire.server.serve import finish
from tests.server.in_process import Server, hold
from tests.server.responses import URL, Say, create, events_of


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_runs_in_the_background_is_ended_with_the_server(say: Say, tmp_path: Path, is_cancelled: bool) -> None:
    """Also where a second signal ends the waiting for it."""
    args = ServerArgs(response_store=str(tmp_path / "responses.db"), drain_timeout_s=600 if is_cancelled else 0)

    async def play() -> str:
        server = say(LONG, args=args)
        hold(server)
        response = await ask(server, "POST", URL, input="Hi", background=True)
        gate = DrainGate(request_timeout_s=None, drain_timeout_s=args.drain_timeout_s)
        finishing = asyncio.create_task(finish(server.state, gate))
        await asyncio.sleep(0.01)
        if is_cancelled:
            finishing.cancel()
        await asyncio.wait_for(asyncio.wait({finishing}), 60)
        server.state.responses = None
        return str(response["id"])

    response_id = asyncio.run(play())
    found = say(args=args).get(f"{URL}/{response_id}").json
    assert (found["status"], found["error"]["message"]) == ("failed", "the server was shut down")


LONG = "word " * 60


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[Server]:
    yield server
    await stored_responses(server.state).shutdown()
    server.state.responses = None


async def ask(server: Server, method: str, path: str, **body: Any) -> Any:
    return (await server.request(method, path, json.dumps(body).encode() if body else b"")).json


async def until_over(server: Server, url: str) -> Any:
    while (found := await ask(server, "GET", url))["status"] == "in_progress":
        await asyncio.sleep(0)
    return found


def test_a_response_in_the_background_goes_on_alone(say: Say) -> None:
    async def play() -> None:
        async with serving(say(LONG)) as server:
            gate = hold(server)
            response = await ask(server, "POST", URL, input="Hi", background=True)
            assert (response["status"], response["output"], response["background"]) == ("in_progress", [], True)
            refused = await ask(server, "POST", URL, input="Hi", previous_response_id=response["id"])
            assert "is still in progress" in refused["error"]["message"]
            gate.set()
            done = await until_over(server, f"{URL}/{response['id']}")
            assert done["status"] == "completed"
            assert done["output"][0]["content"][0]["text"] == LONG
            again = await ask(server, "POST", f"{URL}/{response['id']}/cancel")
            assert again == done

    asyncio.run(play())


def test_a_response_in_the_background_is_cancelled_once(say: Say) -> None:
    async def play() -> None:
        async with serving(say(LONG)) as server:
            hold(server)
            response = await ask(server, "POST", URL, input="Hi", background=True)
            url = f"{URL}/{response['id']}"
            cancelled = await ask(server, "POST", f"{url}/cancel")
            assert cancelled["status"] == "cancelled"
            assert not server.engine.has_unfinished_requests()
            assert await ask(server, "POST", f"{url}/cancel") == cancelled
            assert await ask(server, "GET", url) == cancelled

    asyncio.run(play())


def test_one_that_is_not_in_the_background_cannot_be_cancelled(say: Say) -> None:
    server = say()
    answer = server.post(f"{URL}/{create(server)['id']}/cancel", {})
    assert answer.status == 400
    assert "background" in answer.error["message"]


def test_a_response_in_the_background_that_is_deleted_ends(say: Say) -> None:
    async def play() -> None:
        async with serving(say(LONG)) as server:
            hold(server)
            response = await ask(server, "POST", URL, input="Hi", background=True)
            url = f"{URL}/{response['id']}"
            assert (await ask(server, "DELETE", url))["deleted"]
            assert not server.engine.has_unfinished_requests()
            assert "error" in await ask(server, "GET", url)

    asyncio.run(play())


def test_the_stream_of_a_response_in_the_background_can_be_taken_up(say: Say) -> None:
    async def play() -> None:
        async with serving(say(LONG)) as server:
            body = json.dumps({"input": "Hi", "background": True, "stream": True}).encode()
            broken = await server.request("POST", URL, body, vanish_after=4)
            seen = [json.loads(line[6:]) for line in broken.body.decode().splitlines() if line.startswith("data: ")]
            url = f"{URL}/{seen[0]['response']['id']}"
            assert not broken.is_complete
            last = seen[-1]["sequence_number"]
            for _ in range(2):  # while it runs, and when it is over
                rest = events_of(await server.request("GET", f"{url}?stream=true&starting_after={last}"))
                assert [event["sequence_number"] for event in rest] == list(range(last + 1, last + 1 + len(rest)))
                assert rest[-1]["type"] == "response.completed"
                text = "".join(event["delta"] for event in [*seen, *rest] if event["type"].endswith("text.delta"))
                assert text == LONG

    asyncio.run(play())


def test_only_a_stream_in_the_background_can_be_streamed_again(say: Say) -> None:
    server = say()
    answer = server.get(f"{URL}/{create(server)['id']}?stream=true")
    assert (answer.status, answer.error["param"]) == (400, "stream")


def test_a_client_that_goes_away_cancels_its_response(say: Say) -> None:
    async def play() -> None:
        async with serving(say(LONG)) as server:
            gate = hold(server)
            body = json.dumps({"input": "Hi", "stream": True}).encode()
            broken = await server.request("POST", URL, body, vanish_after=4)
            response_id = json.loads(broken.body.decode().splitlines()[1][6:])["response"]["id"]
            assert not server.engine.has_unfinished_requests()
            kept = await ask(server, "GET", f"{URL}/{response_id}")
            assert kept["status"] == "cancelled"
            gate.set()
            follow = await ask(server, "POST", URL, input="Go on", previous_response_id=response_id)
            assert follow["status"] == "completed"

    asyncio.run(play())


def test_the_end_of_the_server_fails_what_runs(say: Say, tmp_path: Path) -> None:
    args = ServerArgs(response_store=str(tmp_path / "responses.db"))

    async def play() -> str:
        async with serving(say(LONG, args=args)) as server:
            hold(server)
            response = await ask(server, "POST", URL, input="Hi", background=True)
            return str(response["id"])

    response_id = asyncio.run(play())
    found = say(args=args).get(f"{URL}/{response_id}").json
    assert (found["status"], found["error"]["message"]) == ("failed", "the server was shut down")


def test_a_background_response_that_takes_too_long_fails(say: Say) -> None:
    async def play() -> None:
        async with serving(say(LONG, args=ServerArgs(request_timeout_s=1e-6))) as server:
            hold(server)
            response = await ask(server, "POST", URL, input="Hi", background=True)
            done = await until_over(server, f"{URL}/{response['id']}")
            assert (done["status"], done["error"]["code"]) == ("failed", "request_timeout")

    asyncio.run(play())


def test_a_client_that_goes_away_while_its_response_is_stored_cancels_it(say: Say) -> None:
    async def play() -> None:
        async with serving(say(LONG)) as server:
            store = stored_responses(server.state).store
            add, ids = store.add, []

            async def add_and_vanish(owner: str, new: StoredResponse) -> None:
                ids.append(new.id)
                await add(owner, new)
                raise asyncio.CancelledError

            store.add = add_and_vanish  # type: ignore[method-assign]
            with pytest.raises(asyncio.CancelledError):
                await server.request("POST", URL, b'{"input": "Hi"}')
            assert (await ask(server, "GET", f"{URL}/{ids[0]}"))["status"] == "cancelled"
            assert not server.engine.has_unfinished_requests()

    asyncio.run(play())


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_those_that_begin_at_once_are_counted_too(say: Say, limit: int) -> None:
    async def play() -> list[int]:
        async with serving(say(LONG, args=ServerArgs(max_concurrent_per_tenant=limit))) as server:
            hold(server)
            body = json.dumps({"input": "Hi", "background": True}).encode()
            answers = await asyncio.gather(*[server.request("POST", URL, body) for _ in range(4)])
            refused = await server.request("POST", URL, b'{"input": [], "background": true}')
            assert refused.status == 429, "those that were refused are not counted"
            return sorted(answer.status for answer in answers)

    assert asyncio.run(play()) == [200] * limit + [429] * (4 - limit)
