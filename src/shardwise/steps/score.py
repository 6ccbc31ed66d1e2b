"""How likely given tokens are, and which ids are the likeliest, under every layout of the head.

Works on a part of the sequence at a time, as the loss does (loss.py), and gathers no logits. Nothing here is
differentiated.
"""

from __future__ import annotations

from functools import partial

import jax

from shardwise.models.head import Head, HeadShard, HeadValues
from shardwise.partition.constraints import Placement
from shardwise.partition.plan import partition_spec
from shardwise.steps.loss import in_chunks, joined


def token_scores(
    place: Placement, hidden: jax.Array, head: Head, targets: jax.Array, top_n: int = 0
) -> dict[str, jax.Array]:
    """Negative log-likelihood of every target, whether it is the likeliest id, and the likeliest ids.

    Args:
        hidden: [B, T, D].
        head: [V, D].
        targets: int32 [B, T].
        top_n: how many likeliest ids to list; 0 for none, at most V.

    Returns:
        nll: float32 (or wider) [B, T] in nats.
        right: bool [B, T].
        top_ids: int32 [B, T, top_n], the likeliest first, ties by rising id; only with top_n.
        top_logprobs: their log-probabilities, like nll; only with top_n.
    """
    batch = place.spread("batch")
    rows, lists = partition_spec((batch, ())), partition_spec((batch, (), ()))
    out_specs = {"nll": rows, "right": rows}
    if top_n:
        out_specs |= {"top_ids": lists, "top_logprobs": lists}

    @partial(
        jax.shard_map,
        mesh=place.mesh,
        in_specs=(head.hidden_spec(place), head.specs, rows),
        out_specs=out_specs,
        check_vma=False,
    )
    def local(x: jax.Array, values: HeadValues, targets: jax.Array) -> dict[str, jax.Array]:
        shard = HeadShard(place, head, values)
        columns = shard.columns

        def one(_: None, chunk: tuple[jax.Array, jax.Array]) -> tuple[None, dict[str, jax.Array]]:
            x, targets = chunk
            logits = shard.logits(x)
            best = columns.max(logits)
            lse, _ = columns.log_sum_exp(logits, best)
            picked = columns.pick(logits, targets)
            out = {"nll": lse - picked, "right": picked >= best}
            if top_n:
                values, out["top_ids"] = columns.top(logits, top_n)
                out["top_logprobs"] = values - lse[..., None]
            return None, out

        _, out = jax.lax.scan(one, None, in_chunks(shard.weight.shape[0], x, targets))
        return {name: joined(value, x.shape[1]) for name, value in out.items()}

    return local(head.pad_hidden(place, hidden), head.values, targets)
