"""How long the page's frames take: python -m tools.page_frames [--blocks 682 32768 1000000] [--json FILE]

Chromium shows a made-up cache (page_server.py) that changes 30 times a second, while the map is zoomed in and out. Of
each frame this measures how long the page's main thread is busy, from the browser's own trace: scripts, styles, layout
and painting. (Without a screen, the time between two frames is always a multiple of 1/60 s.) Each size has one line of
JSON; `busy_ms` is the time that passed, `cpu_ms` the processor time, which other programs disturb less.
"""

import argparse
import json
import shutil
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from tools.page_server import SyntheticCache, page_server

SECONDS = 8
CATEGORIES = ["devtools.timeline", "disabled-by-default-devtools.timeline", "devtools.timeline.frame", "toplevel"]
NUM_RUNNING = {682: 8, 32_768: 96, 1_000_000: 256}
TASKS = {"RunTask", "ThreadControllerImpl::RunTask"}


def main() -> int:
    """Measure each size and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=list(NUM_RUNNING))
    parser.add_argument("--json", type=Path, help="also append the results to this file")
    args = parser.parse_args()
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=path) as browser:
        for num_blocks in args.blocks:
            cache = SyntheticCache(num_blocks, NUM_RUNNING.get(num_blocks, max(4, num_blocks // 400)))
            with (
                page_server(cache, frames_per_s=30) as url,
                browser.new_page(viewport={"width": 1440, "height": 1000}) as page,
            ):
                page.goto(url)
                page.wait_for_function("() => document.querySelector('#map h3')?.textContent.includes(', ')")
                page.wait_for_timeout(1500 + num_blocks / 100)
                browser.start_tracing(page=page, categories=CATEGORIES)
                _zoom(page)
                trace = json.loads(browser.stop_tracing())
            row = {"benchmark": "page_frames", "blocks": num_blocks, **_summary(trace["traceEvents"])}
            print(json.dumps(row), flush=True)
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return 0


def _zoom(page: Page) -> None:
    """Zoom in and out with the wheel and the keys for SECONDS."""
    canvas = page.locator("#map canvas").first
    canvas.focus()
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 3, box["y"] + box["height"] / 2)
    for turn in range(SECONDS * 10):
        page.mouse.wheel(0, -60 if turn // 20 % 2 == 0 else 60)
        if turn % 20 == 10:
            page.keyboard.press("ArrowRight")
        page.wait_for_timeout(100)


def _summary(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Percentiles of the main thread's busy time in each frame, in milliseconds."""
    threads = {
        (e["pid"], e["tid"]) for e in events
        if e.get("name") == "thread_name" and e["args"]["name"] == "CrRendererMain"
    }  # fmt: skip
    fired = sorted(
        (e["ts"], (e["pid"], e["tid"])) for e in events
        if e.get("name") == "FireAnimationFrame" and (e["pid"], e["tid"]) in threads
    )  # fmt: skip
    busiest = statistics.mode(thread for _, thread in fired)
    tasks = sorted(
        (e["ts"], e["dur"], e.get("tdur", e["dur"])) for e in events
        if e.get("name") in TASKS and e.get("ph") == "X" and (e["pid"], e["tid"]) == busiest
    )  # fmt: skip
    outermost: list[tuple[float, float, float]] = []
    for ts, dur, cpu in tasks:
        if not outermost or ts >= outermost[-1][0] + outermost[-1][1]:
            outermost.append((ts, dur, cpu))
    starts = []  # of the tasks in which the frames are made
    for ts, dur, _ in outermost:
        if any(ts <= at < ts + dur for at, thread in fired if thread == busiest):
            starts.append(ts)
    wall, busy = [], []
    for start, end in pairwise(starts):
        within = [(dur, cpu) for ts, dur, cpu in outermost if start <= ts < end]
        wall.append(sum(dur for dur, _ in within) / 1000)
        busy.append(sum(cpu for _, cpu in within) / 1000)
    steps = [(b - a) / 1000 for a, b in pairwise(starts)]
    return {
        "frames": len(wall),
        **{f"busy_ms_p{share}": round(_percentile(wall, share), 2) for share in (50, 95, 99)},
        **{f"cpu_ms_p{share}": round(_percentile(busy, share), 2) for share in (50, 95, 99)},
        "interval_ms_p50": round(statistics.median(steps), 2),
        "interval_ms_p95": round(_percentile(steps, 95), 2),
    }


def _percentile(values: list[float], share: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * share // 100)]


if __name__ == "__main__":
    sys.exit(main())
