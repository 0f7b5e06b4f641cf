"""Draws the pictures of the report in the guides: `python scripts/draw_report_pictures.py`; needs chromium.

A small run is stopped in the middle by a Ctrl-C and resumed, so that the page shows a resume.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
STEPS, STOPPED = 150, 90
TRAIN = (
    *("--model", "gpt2-tiny", "--text", str(ROOT / "offload"), "--steps", str(STEPS), "--eval-every", "25"),
    *("--eval-data", str(ROOT / "docs" / "tour.md"), "--batch-size", "4", "--seq-len", "128", "--dtype", "bf16"),
    *("--device", "cpu", "--nvme-path", "swap", "--run", "small", "--config", "ds.json", "--log", "run.jsonl"),
    *(
        "--offload-param",
        "nvme",
        "--offload-optimizer",
        "nvme",
        "--host-memory",
        "40MiB",
        "--resume",
        "auto",
        "--no-output",
        "--trace",
    ),
)
LIGHT, DARK = (), ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")


def train(folder: Path, trace: str, stop: int | None = None) -> None:
    """Runs `offload train`, and stops it by a Ctrl-C after the step `stop`."""
    command = [sys.executable, "-m", "offload", "train", *TRAIN, trace]
    process = subprocess.Popen(command, cwd=folder)
    log = folder / "run.jsonl"
    while process.poll() is None:
        time.sleep(0.05)
        if stop is not None and log.exists() and len(re.findall(r'"step": ', log.read_text())) >= stop:
            process.send_signal(signal.SIGINT)
            stop = None
    if process.returncode not in (0, 130):
        raise SystemExit(f"offload train ended with {process.returncode}")


def picture(html: str, folder: Path, name: str, height: int, options: tuple[str, ...]) -> None:
    """Draws the top of a page, 944 pixels wide."""
    page = folder / f"{name}.html"
    page.write_text(html)
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("there is no chromium: apt install chromium")
    common = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'browser'}",
    )
    command = (
        chromium,
        *common,
        *options,
        f"--window-size=944,{height}",
        f"--screenshot={IMAGES / name}",
        page.as_uri(),
    )
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def main() -> None:
    """Trains, makes the page, and draws its top in light and its last section in dark."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "ds.json").write_text(json.dumps({"offload": {"drive_tbw": 600, "drive_share": 0.5}}))
        train(folder, "first.json.gz", STOPPED)
        train(folder, "trace.json.gz")
        report = [sys.executable, "-m", "offload", "report", "run.jsonl", "--trace", "trace.json.gz", "-o", "run.html"]
        subprocess.run(report, cwd=folder, check=True)
        html = (folder / "run.html").read_text()
        picture(html, folder, "report-light.png", 960, LIGHT)
        # The section of the timeline alone: the others are hidden.
        alone = "<style>main > :not(section:last-of-type) { display: none }</style></head>"
        picture(html.replace("</head>", alone, 1), folder, "report-dark.png", 420, DARK)


if __name__ == "__main__":
    main()
