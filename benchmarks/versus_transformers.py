"""shardwise and transformers side by side on one model and machine; prints a table and writes JSON.

    python benchmarks/versus_transformers.py --model FOLDER --peer-python .venv-parity/bin/python

Each measurement is a process of its own, one after the other, ours and the peer's in turn, so that a
noisy minute strikes both. FOLDER is a Hugging Face folder in float32 (`shardwise convert` makes one).
Not here: what is measured (ours.py, peer_transformers.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CASES = {
    "train float32": "--what train --dtype float32 --batch 4 --length 256 --steps 5",
    "train bfloat16": "--what train --dtype bfloat16 --batch 4 --length 256 --steps 2",
    "decode 1": "--what decode --dtype float32 --batch 1 --new-tokens 24",
    "decode 8": "--what decode --dtype float32 --batch 8 --new-tokens 16",
    "prefill 128": "--what prefill --dtype float32 --batch 1 --steps 5",
    "load": "--what load --dtype float32",
}
# What is compared in each case: (ours, the peer's, higher is better).
KEYS = {
    "train": ("tokens_per_second_median", "tokens_per_s_median", True),
    "decode": ("step_ms_median", "step_ms_median", False),
    "prefill": ("prefill_ms_median", "prefill_ms_median", False),
    "load": ("load_and_logits_s", "load_and_first_logits_s", False),
}


def measure(python: str, script: str, arguments: list[str]) -> dict[str, float]:
    """The JSON that one process prints last."""
    environment = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
    done = subprocess.run(
        [python, str(HERE / script), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Run the cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--peer-python", required=True, help="interpreter that has torch and transformers")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--out", default="versus_transformers.json")
    args = parser.parse_args()
    results = {}
    print("ratio: above 1 we are ahead; peak: resident memory of the process in MB")
    print(f"{'case':16} {'shardwise':>12} {'transformers':>14} {'ratio':>7} {'peak':>7} {'peer peak':>10}")
    for name in args.cases:
        case = ["--model", args.model, *CASES[name].split()]
        ours = measure(sys.executable, "ours.py", case)
        peer = measure(args.peer_python, "peer_transformers.py", case)
        results[name] = {"ours": ours, "peer": peer}
        our_key, peer_key, higher = KEYS[name.split()[0]]
        a, b = ours[our_key], peer.get(peer_key, float("nan"))
        peaks = [side.get("peak_rss_mb", float("nan")) for side in (ours, peer)]
        ratio = a / b if higher else b / a
        print(f"{name:16} {a:12.1f} {b:14.1f} {ratio:7.2f} {peaks[0]:7.0f} {peaks[1]:10.0f}", flush=True)
        Path(args.out).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
