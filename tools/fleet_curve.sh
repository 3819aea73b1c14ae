#!/bin/bash
# Draw docs/images/fleet.svg: fleet_curve.sh COSTS, with the rows of `quire bench steps` (benchmarks/fleet.py writes some).
set -euo pipefail
trace=$(mktemp)
trap 'rm -f "$trace"' EXIT
python - > "$trace" <<'END'
import msgspec
from quire.interfaces.simulate.workloads import synthetic_trace

for request in synthetic_trace(1, 300, shape="sharegpt", requests_per_s=8.0):
    print(msgspec.json.encode(request).decode())
END
python -m quire plan --fleet "$trace" --slo ttft=3s,itl=200ms --costs "$1" --max-num-seqs 32 \
    --num-gpu-blocks-override 4096 --max-engines 64 --plot docs/images/fleet.svg
