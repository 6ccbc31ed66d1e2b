"""How fast a sharded checkpoint of 1.2 billion parameters is read onto a mesh, beside transformers.

    python benchmarks/import_speed.py --folder EMPTY --peer-python .venv-parity/bin/python

Writes random weights of Llama 3.2 1B's shapes in bfloat16 (2.5 GB, in shards of 1 GB) to the folder, which it
leaves there for another run, and reads them once so that the files are in the page cache. Then both programs
read them in turn, each time in a new process: shardwise onto fsdp 2 × tp 2 (four simulated devices),
transformers with `from_pretrained`. Only the reading is timed, not the imports. Before each, a process
writes 6 GB of memory and ends: on a virtual machine whose host takes idle memory back, whoever touches it
first would pay for fetching it again (up to 2 s a GB where this was written). Not here: memory while reading
(load_memory.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

PRESET = "llama3.2-1b"
OURS = """
import sys, time
from shardwise.runtime.devices import configure_devices
configure_devices("cpu:4")
import jax
from shardwise.api import open_model, plan
from shardwise.checkpoints.load import load_params
from shardwise.families import config_from_hf
from shardwise.partition.mesh import MeshSpec, build_mesh
spec = MeshSpec.parse("dp:1,fsdp:2,tp:2")
jax.block_until_ready([jax.device_put(0.0, device) for device in jax.devices()])
start = time.perf_counter()
checkpoint = open_model(sys.argv[1])
made = plan(config_from_hf(checkpoint.hf_config), spec)
params = load_params(checkpoint, made, build_mesh(spec), None, stacked=sys.argv[2] == "stacked")
jax.block_until_ready(params)
print(time.perf_counter() - start, sum(value.nbytes for value in params.values()))
"""
THEIRS = """
import sys, time
import torch
from transformers import AutoModelForCausalLM
start = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
# an array that is only mapped is not read yet: touch all of it, as ours has been
total = sum(float(p.view(torch.int16)[..., ::64].sum()) for p in model.parameters())
print(time.perf_counter() - start, sum(p.numel() * 2 for p in model.parameters()))
"""

WARM = "import numpy; numpy.ones(6 << 30, numpy.uint8)"


def write(folder: Path) -> None:
    """The checkpoint, if it is not there yet."""
    import ml_dtypes
    import numpy as np

    from shardwise.checkpoints.hf_writer import write_hf_folder
    from shardwise.families import config_from_hf, get_family
    from shardwise.families.presets import preset

    if (folder / "config.json").exists():
        return
    hf_config = preset(PRESET)
    config = config_from_hf(hf_config)
    block = np.random.default_rng(0).standard_normal(1 << 22, np.float32).astype(ml_dtypes.bfloat16)

    def tensors():  # type: ignore[no-untyped-def]
        for name in get_family(config.family).tensor_names(config):
            shape = name.hf_shape(config.sizes())
            layers = range(config.num_layers) if "{layer}" in name.hf_name else (0,)
            for layer in layers:
                yield name.hf_name.format(layer=layer), np.resize(block, shape)

    write_hf_folder(
        folder, hf_config={**hf_config, "torch_dtype": "bfloat16"}, tensors=tensors(),
        max_shard_bytes=1 << 30,
    )  # fmt: skip


def seconds(python: str, code: str, *arguments: str) -> tuple[float, int]:
    """Time and bytes that a new process reports."""
    ran = subprocess.run([python, "-c", code, *arguments], capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(ran.stderr)
    time_taken, size = ran.stdout.split()[-2:]
    return float(time_taken), int(size)


def main() -> None:
    """Write, read in turn, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--peer-python", required=True, help="an interpreter with torch and transformers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    write(args.folder)
    for file in args.folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            while opened.read(1 << 24):
                pass
    readers = {
        "shardwise, layers stacked": (sys.executable, OURS, "stacked"),
        "shardwise, one array per layer": (sys.executable, OURS, "apart"),
        "transformers": (args.peer_python, THEIRS, ""),
    }
    times: dict[str, list[float]] = {name: [] for name in readers}
    size = 0
    for _ in range(args.rounds):
        for name, (python, code, how) in readers.items():
            subprocess.run([sys.executable, "-c", WARM], check=True)
            taken, size = seconds(python, code, str(args.folder), how)
            times[name].append(taken)
    for name, taken in times.items():
        middle = statistics.median(taken)
        print(
            f"{name:<32} {middle:6.2f} s ({min(taken):.2f}–{max(taken):.2f})  {size / middle / 1e9:.2f} GB/s"
        )
    if args.out:
        args.out.write_text(json.dumps({"bytes": size, "seconds": times}, indent=1))


if __name__ == "__main__":
    main()
