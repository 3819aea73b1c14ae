"""What the router learns of requests that get one token in each step, without work for each token."""

from __future__ import annotations

from collections import defaultdict

from quire.engine.routing.router import EngineLoad, Route


class LaneRoutes:
    """The routes of the requests in one engine's lane. What `Router.on_tokens` would do for each of them in each step
    is done to the engine's load in that step, and to a route when it leaves."""

    def __init__(self, load: EngineLoad) -> None:
        self._load = load
        self._num_steps = 0
        self._joined: dict[Route, int] = {}
        """For each route, the number of steps before it joined."""
        self._due: defaultdict[int, list[Route]] = defaultdict(list)
        """By number of steps before, those that get more tokens than expected in the step, for the first time."""
        self._num_over = 0
        """Number of routes that have got more tokens than expected."""

    def join(self, route: Route) -> None:
        """The request gets one token in each step from now on. It has got some before."""
        self._joined[route] = self._num_steps
        self._due[self._num_steps + int(route.num_new)].append(route)

    def on_step(self) -> None:
        """All requests have got a token."""
        self._load.num_given += self._num_over
        for route in self._due.pop(self._num_steps, ()):
            self._load.num_given += 1.0 - route.num_new % 1.0
            self._num_over += 1
        self._num_steps += 1

    def leave(self, route: Route) -> None:
        """The request has ended, or gets its tokens in another way from now on."""
        joined = self._joined.pop(route)
        num_tokens, num_expected = self._num_steps - joined, int(route.num_new)
        route.num_got += num_tokens
        if num_tokens > num_expected:
            self._num_over -= 1
            route.num_new = 0.0
        else:
            self._due[joined + num_expected].remove(route)
            route.num_new -= num_tokens
