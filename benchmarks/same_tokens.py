"""Do the tokens of an engine of several ranks equal those of one rank? Judged in 16 bits and FP8, where sums round differently.

Both engines get the same answer forced upon them token by token, in generation steps, and their logits are compared at each
position. Another top-1 counts as rounding only where the single rank's top-2 margin is below the measured noise: how far that
engine's logits are from the same model's in float32 (`float32_logits`), which no engine of several ranks has a part in. For
quantized weights there is no such model; there the noise is how far the engine's own logits move when the same tokens are
read as prompts, by other kernels. Then both answer freely, and the first token that differs is judged in the same way, for
so far they had read the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from random_checkpoint import random_weight
from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.reference.convert_plan import source_tensors
from trtllm_workshop.reference.llm import LLM
from trtllm_workshop.reference.request import Request
from trtllm_workshop.reference.sampling_params import SamplingParams, StopRules

# Noise is only a yardstick while it is small beside the logits; an engine that is wrong by itself is not.
MOST_NOISE = 0.2


class _Forced(Request):
    """A request that takes given tokens instead of the chosen ones, through the real step loop."""

    forced: list[int]

    def accept(self, token: int) -> None:
        super().accept(self.forced[len(self.token_ids)])


@dataclass(frozen=True)
class Told:
    """What the engine of one rank says.

    prompts, answers: token ids. logits: [prompts, answer, vocabulary] float32, by generation steps (the first by a prompt's).
    noise: the largest difference of the same logits from the yardstick's.
    """

    prompts: list[list[int]]
    answers: list[list[int]]
    logits: torch.Tensor
    noise: float


def greedy(tokens: int, **more: Any) -> SamplingParams:
    """Exactly so many of the most likely tokens."""
    return SamplingParams(max_tokens=tokens, end_id=-1, ignore_eos=True, detokenize=False, **more)


def free_answers(llm: LLM, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    outputs = llm.generate(prompts, greedy(tokens))
    return [output.outputs[0].token_ids for output in (outputs if isinstance(outputs, list) else [outputs])]


def forced_logits(llm: LLM, prompts: list[list[int]], answers: list[list[int]]) -> torch.Tensor:
    """[prompts, answer, vocabulary] float32; the engine must be loaded with gather_generation_logits."""
    executor, requests = llm._executor, []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        params = greedy(len(answer), return_generation_logits=True)
        request = _Forced(10**6 + number, prompt, params, StopRules())
        request.forced = answer
        requests.append(request)
        executor.submit(request)
    while executor.busy:
        executor.step()
    for request in requests:
        if request.error is not None:
            raise request.error
    return torch.stack([torch.stack(request.generation_logits) for request in requests])


def prompt_logits(llm: LLM, prompts: list[list[int]], answers: list[list[int]]) -> torch.Tensor:
    """The same logits as `forced_logits`, each from a prompt that ends there."""
    longer = [p + a[:at] for p, a in zip(prompts, answers, strict=True) for at in range(len(a))]
    outputs = llm.generate(longer, greedy(1, return_generation_logits=True))
    rows = [output.outputs[0].generation_logits[0] for output in (outputs if isinstance(outputs, list) else [outputs])]
    return torch.stack(rows).view(len(prompts), -1, rows[0].shape[-1])


def float32_logits(
    config: dict[str, Any], seed: int, device: torch.device, prompts: list[list[int]], answers: list[list[int]]
) -> torch.Tensor:
    """The same logits as `forced_logits` by Hugging Face's model in float32, with the weights of `write_split_checkpoint`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    names += ("vocab_size", "max_position_embeddings")
    own = {"head_dim": config["head_size"], "rms_norm_eps": config["norm_epsilon"], "rope_theta": config["rotary_base"]}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**{name: config[name] for name in names}, **own)).eval()
    shapes = source_tensors(ModelSpec.from_checkpoint_config(config))
    weights = {name: random_weight(name, shape, seed, device).float() for name, shape in shapes.items()}
    model.load_state_dict(weights, assign=True)
    # The table of rotary frequencies is no weight, so it is still without values.
    with device:
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    ids = torch.tensor([p + a[:-1] for p, a in zip(prompts, answers, strict=True)], device=device)
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits[:, len(prompts[0]) - 1 :]
    return logits.float().cpu()


def tell(
    llm: LLM,
    prompts: list[list[int]],
    tokens: int,
    yardstick: Callable[[list[list[int]], list[list[int]]], torch.Tensor] | None = None,
) -> Told:
    """The answers of the engine of one rank, and its noise.

    Args:
        prompts: all of one length.
        yardstick: gives exact logits of (prompts, answers); without it the engine is compared with itself.

    Raises:
        RuntimeError: when the noise is too large to judge anything by it.
    """
    answers = free_answers(llm, prompts, tokens)
    logits = forced_logits(llm, prompts, answers)
    exact = prompt_logits(llm, prompts, answers) if yardstick is None else yardstick(prompts, answers)
    noise, largest = float((exact - logits).abs().max()), float(logits.abs().max())
    if not noise < MOST_NOISE * largest:
        raise RuntimeError(
            f"the engine of one rank is {noise:.3g} from its yardstick where logits reach {largest:.3g}: too much to "
            "compare others with it"
        )
    return Told(prompts, answers, logits, noise)


def compare(one: Told, free: list[list[int]], logits: torch.Tensor) -> dict[str, Any]:
    """Judge an engine of several ranks by its free answers and the logits of forced ones; see the module."""
    top = one.logits.topk(2).values
    margin = top[..., 0] - top[..., 1]
    other = logits.argmax(-1) != one.logits.argmax(-1)
    most = one.noise
    no_number = ~logits.isfinite().all(-1)
    unexplained = int(((other & (margin >= most)) | no_number).sum())
    parted = []
    for row, (mine, theirs) in enumerate(zip(free, one.answers, strict=True)):
        first = next((at for at, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
        if first is not None:
            parted.append(float(margin[row, first]))
    unexplained_answers = sum(value >= most for value in parted)
    return {
        "positions": other.numel(),
        "other_top1": int(other.sum()),
        "other_top1_unexplained": unexplained,
        "answers": len(free),
        "answers_that_part": len(parted),
        "answers_that_part_unexplained": unexplained_answers,
        "logit_noise": round(one.noise, 6),
        "logit_difference": round(float((logits - one.logits).abs().max()), 6),
        "positions_below_the_noise": int((margin < most).sum()),
        "tokens_equal": not unexplained and not unexplained_answers,
    }
