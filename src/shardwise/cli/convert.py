"""`shardwise convert`: read a model of any known format and write a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from shardwise.cli.options import MeshOptions, option, refuse_without_effect, require_model, require_new
from shardwise.cli.startup import start


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(MeshOptions):
    """Read a model of any known format and write it as a Hugging Face folder."""

    section: ClassVar[str] = "conversion"
    example: ClassVar[str] = "shardwise convert SmolLM2-135M.gguf ./SmolLM2-135M --dtype bfloat16"

    model: str = option(metavar="MODEL", positional=True)
    """A folder of safetensors, or a .gguf file."""
    out: str = option(metavar="OUT", positional=True)
    """The folder to write. It must not exist yet."""
    dtype: Literal["keep", "float32", "bfloat16", "float16"] = option("keep")
    """Number format of the written tensors; `keep` leaves each as it is (quantised ones become float32)."""

    def _check_combination(self, given: frozenset[str]) -> None:
        if self.mesh is None and self.plan is None:
            names = ("devices", "rules", "override", "head_layout")
            refuse_without_effect(given, names, "without --mesh", "add --mesh SPEC")
        super()._check_combination(given)

    def check_paths(self) -> None:
        super().check_paths()
        require_model(self.model)
        require_new("OUT", self.out)


def run(options: ConvertOptions) -> int:
    """Converts; returns the exit code."""
    start(options)
    from shardwise.api import load, open_model
    from shardwise.families import config_from_hf
    from shardwise.planner.choose import plan_for
    from shardwise.steps.workload import Workload

    dtype = None if options.dtype == "keep" else options.dtype
    config = config_from_hf(open_model(options.model).hf_config)
    # All fsdp by default: every device reads its part; how the head is cut makes no difference here.
    the_plan = plan_for(
        options, config, "train", lambda mesh: Workload("logits", mesh.dp * mesh.fsdp, 1), lambda _: None
    )
    model = load(options.model, plan=the_plan)
    model.export(options.out, dtype)
    print(
        f"wrote {options.out}: {model.config.family}, {len(model.params):,} arrays, {dtype or 'dtypes kept'}"
    )
    return 0
