"""Carries out step plans on one rank: its engine, its KV-cache pool, its share of what the ranks exchange.

With pipeline stages the hidden states of all tokens go from stage to stage, and the last stage sends rank 0 what it asked
for: the most likely tokens, and the logits if they are wanted. With tensor parallelism alone every rank has them anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_workshop.reference.cuda_graphs import GenerationGraphs, resolve_tokens
from trtllm_workshop.reference.cuda_kernels import can_capture
from trtllm_workshop.reference.engine import Engine
from trtllm_workshop.reference.kv_pool import KvPool
from trtllm_workshop.reference.parallel import Communicator
from trtllm_workshop.reference.step_inputs import StepInputs
from trtllm_workshop.reference.step_plan import GraphStep, StepPlan
from trtllm_workshop.reference.warm_up import warm_up_plans


@dataclass(frozen=True)
class StepResult:
    """What a step leaves on the device.

    tokens: [rows], int64, the largest logit's. logits: [rows, vocabulary] where the plan wants them.
    in_graph: whether the tokens lie in buffers of the graphs, good until the next step.
    """

    tokens: torch.Tensor
    logits: torch.Tensor | None
    in_graph: bool


class RankStep:
    """Runs the steps of one rank.

    Args:
        engine: the rank's engine.
        pool: its KV cache, with one spare block on CUDA, for the padding rows of graphs.
        max_batch_size: most requests of a step.
        communicator: the connections to the other ranks, if there are any.
    """

    def __init__(
        self, engine: Engine, pool: KvPool, max_batch_size: int, communicator: Communicator | None = None
    ) -> None:
        self._engine, self._pool, self._ranks = engine, pool, communicator
        self._max_batch_size = max_batch_size
        self.graphs: GenerationGraphs | None = None
        # What travels over the host, or from stage to stage, is not recorded.
        alone = communicator is None or (communicator.capturable and communicator.mapping.pp_size == 1)
        if alone and can_capture(engine):
            most_blocks = -(-engine.build_config["max_seq_len"] // pool.tokens_per_block)
            self.graphs = GenerationGraphs(
                engine.run, pool.tensor, max_batch_size, most_blocks, pool.blocks, pool.tokens_per_block
            )

    def warm_up(self) -> None:
        """Run one step of every kind in the pool's spare block; all ranks of an engine do so at the same time."""
        build, pool = self._engine.build_config, self._pool
        tokens, length = build["max_num_tokens"], build["max_seq_len"]
        chunks = bool(build["plugin_config"].get("use_paged_context_fmha", True))
        for plan in warm_up_plans(pool.blocks, pool.tokens_per_block, self._max_batch_size, tokens, length, chunks):
            self.run(plan, None)
        if self.graphs is not None:
            self.graphs.warm_up()

    def run(self, plan: StepPlan, before: StepResult | None) -> StepResult:
        """Queue one step; on a device nothing is waited for.

        Args:
            plan: what to do.
            before: the step before, which a plan that `follows` refers to.
        """
        previous = before if plan.follows else None
        if isinstance(plan.work, GraphStep):
            if self.graphs is None:
                raise RuntimeError("this rank has no CUDA graphs, and rank 0 has: all ranks need the same kind of GPU")
            tokens = previous.tokens if previous is not None and not previous.in_graph else None
            work = plan.work
            done = self.graphs.step(work.tokens, work.lengths, work.blocks, tokens, plan.want_logits)
            return StepResult(done.tokens, done.logits, True)
        inputs = plan.work.send(self._engine.device)
        ids = inputs.input_ids
        if previous is not None:
            ids = resolve_tokens(ids, previous.tokens)
        if self._ranks is not None and self._ranks.mapping.pp_size > 1:
            return self._run_stage(self._ranks, ids, inputs, plan.want_logits)
        logits = self._engine.run(ids, inputs.position_ids, inputs.last_token_ids, self._pool.tensor, *inputs.cache)
        return StepResult(logits.argmax(-1), logits if plan.want_logits else None, False)

    def _run_stage(self, ranks: Communicator, ids: torch.Tensor, inputs: StepInputs, want_logits: bool) -> StepResult:
        place, engine = ranks.mapping, self._engine
        hidden = engine.pretrained_config["hidden_size"]
        first = ids
        if not place.is_first_stage:
            first = ranks.receive((len(ids), hidden), engine.hidden_states_dtype, place.rank - place.tp_size)
        picked = (inputs.last_token_ids,) if place.is_last_stage else ()
        out = engine.run(first, inputs.position_ids, *picked, self._pool.tensor, *inputs.cache)
        speaker = (place.pp_size - 1) * place.tp_size  # the last stage's first rank
        if not place.is_last_stage:
            ranks.send(out, place.rank + place.tp_size)
        elif place.rank == speaker:
            ranks.send(out.argmax(-1), 0)
            if want_logits:
                ranks.send(out.float(), 0)
        if place.rank != 0:
            return StepResult(ids, None, False)
        rows = len(inputs.last_token_ids)
        tokens = ranks.receive((rows,), torch.int64, speaker)
        shape = (rows, engine.pretrained_config["vocab_size"])
        logits = ranks.receive(shape, torch.float32, speaker) if want_logits else None
        return StepResult(tokens, logits, False)
