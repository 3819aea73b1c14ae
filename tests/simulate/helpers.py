"""Small simulations, checked while they run."""

from msgspec.structs import replace

from quire.config.kv_cache import FullAttentionSpec
from quire.config.kv_layout import kv_cache_config
from quire.config.scheduler import SchedulerConfig
from quire.interfaces.simulate.report import report
from quire.interfaces.simulate.simulator import Simulator

SPEC = FullAttentionSpec(1, 2, "float32")
SECONDS_APART = 1e6


class CheckedSimulator(Simulator):
    """Looks at every block after every step."""

    def step(self):
        super().step()
        self.blocks.check_integrity()


def make(
    *,
    num_blocks=4096,
    block_size=16,
    num_host_blocks=0,
    caching=True,
    tokens=2048,
    seqs=64,
    kind=Simulator,
    churn=None,
    acceptance=None,
    draft_length=4,
    **limits,
):
    host_bytes = num_host_blocks * block_size * SPEC.bytes_per_token
    cache = kv_cache_config([SPEC], block_size, num_blocks=num_blocks, host_bytes=host_bytes)
    return kind(
        cache,
        SchedulerConfig(seqs, tokens, **limits),
        enable_prefix_caching=caching,
        churn=churn,
        acceptance=acceptance,
        draft_length=draft_length,
    )


def simulate(trace, **options):
    """The report of a run that leaves no block held."""
    simulator = make(**options)
    simulator.run(trace)
    simulator.blocks.check_integrity()
    assert simulator.blocks.num_used_blocks == 0
    assert not simulator.scheduler.requests
    return report(simulator)


def alone(trace):
    """The same requests, each after the end of the one before it."""
    return [replace(request, arrival_s=index * SECONDS_APART) for index, request in enumerate(trace)]
