"""Routes of requests that get a token in each step, without work for each token."""

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.routing.router import Router
from quire.interfaces.simulate.fleet.lane_routes import LaneRoutes
from tests.effort import examples

NUM_REQUESTS = 5
EXPECTED = (0, 1, 2.5, 3.25, 7)


def routed():
    """A router with an engine that has requests, each of which has got its first token."""
    router = Router(4)
    router.add_engine(0)
    routes = [router.add(0, [], 10, 0.0, expected) for expected in EXPECTED]
    for route in routes:
        router.on_tokens(route, 1, 1.0)
    return router, routes


@settings(max_examples=examples(100), deadline=None)
@given(steps=st.lists(st.sets(st.integers(0, NUM_REQUESTS - 1)), max_size=20))
def test_requests_in_a_lane_count_as_those_that_get_each_token_by_itself(steps):
    """In each step all in the lane get a token, and then some join and others leave."""
    (router, routes), (plain, plain_routes) = routed(), routed()
    lane, inside = LaneRoutes(router.loads[0]), set()
    for moving in [*steps, set()]:
        lane.on_step()
        for number in inside:
            plain.on_tokens(plain_routes[number], 1, 2.0)
        for number in moving:
            (lane.leave if number in inside else lane.join)(routes[number])
        inside ^= moving
        assert router.loads[0].num_given == plain.loads[0].num_given
    for number in inside:
        lane.leave(routes[number])
    for route, other in zip(routes, plain_routes, strict=True):
        assert (route.num_new, route.num_got) == (other.num_new, other.num_got)
        router.end(route)
