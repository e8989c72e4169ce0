"""What may be asked of the server: the request bodies of OpenAI's API with TensorRT-LLM's further fields.

The fields are OpenAI's (API reference, "Completions" and "Chat") and those that 1.2.1's `trtllm-serve` adds. As there, a field
that does not exist is an error. An official field that the reference does not implement is refused by name, unless it is
given its neutral value.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST_CHOICES = 16
MOST_PROMPTS = 64
_TOKEN = Annotated[int, Field(ge=0, lt=2**31)]
_TOKENS = Annotated[list[_TOKEN], Field(min_length=1)]
_TEXT = Annotated[str, Field(min_length=1)]
_STOP = str | Annotated[list[str], Field(max_length=16)] | None
_NEUTRAL: tuple[Any, ...] = (None, False, [], {}, 0, "", "auto", "none")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    """`include_usage`: a last event with the token counts; `continuous_usage_stats`: the counts so far in every event."""

    include_usage: bool = True
    continuous_usage_stats: bool = False


class Sampling(_Body):
    """What both endpoints share."""

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "logit_bias": _NEUTRAL,
        "use_beam_search": (None, False),
        "best_of": (None, 1),
        "suffix": _NEUTRAL,
        "echo": (None, False),
        "tools": _NEUTRAL,
        "tool_choice": _NEUTRAL,
        "lora_request": (None,),
        "min_p": (None, 0, 0.0),
        "top_p_min": (None, 0, 0.0),
        "length_penalty": (None, 1, 1.0),
        "early_stopping": (None, False),
        "response_format": (None, {"type": "text"}),
    }

    model: str = Field(description="the name that /v1/models lists")
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="of the answer; without it, what the engine's max_seq_len leaves"
    )
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: _STOP = None
    stop_token_ids: list[_TOKEN] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = 1.0
    skip_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    # Refused unless neutral; see REFUSED.
    logit_bias: dict[str, float] | None = None
    use_beam_search: bool | None = None
    best_of: int | None = None
    lora_request: dict[str, Any] | None = None
    min_p: float | None = None
    top_p_min: float | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    response_format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _only_what_is_implemented(self) -> Sampling:
        for name, neutral in self.REFUSED.items():
            value = getattr(self, name, None)
            if value not in neutral:
                raise ValueError(
                    f"{name} is an official field that the reference toolchain does not implement: leave it out, or serve "
                    "with the tensorrt_llm toolchain"
                )
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only for stream: true")
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        return self

    def params(self) -> dict[str, Any]:
        """SamplingParams of one choice, without its seed."""
        return {
            "max_tokens": self.max_tokens,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_k": self.top_k or None,
            "stop": self.stop or None,
            "stop_token_ids": self.stop_token_ids or None,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "ignore_eos": self.ignore_eos,
            "min_tokens": self.min_tokens or None,
            "frequency_penalty": self.frequency_penalty or None,
            "presence_penalty": self.presence_penalty or None,
            "repetition_penalty": None if self.repetition_penalty == 1.0 else self.repetition_penalty,
            "skip_special_tokens": self.skip_special_tokens,
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
        }


class CompletionRequest(Sampling):
    """The body of /v1/completions."""

    prompt: _TEXT | _TOKENS | Annotated[list[_TEXT] | list[_TOKENS], Field(min_length=1, max_length=MOST_PROMPTS)] = (
        Field(description="a text, token ids, or a list of either")
    )
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    add_special_tokens: bool = True
    echo: bool | None = None
    suffix: str | None = None

    def prompts(self) -> list[dict[str, Any]]:
        """One link message part for each prompt."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (isinstance(prompt, list) and isinstance(prompt[0], int)):
            prompt = [prompt]
        return [{"prompt" if isinstance(one, str) else "prompt_token_ids": one} for one in prompt]

    def params(self) -> dict[str, Any]:
        more = {"add_special_tokens": self.add_special_tokens}
        return {**super().params(), **more, **({} if self.logprobs is None else {"logprobs": self.logprobs})}


class TextPart(_Body):
    """A part of a message; only text."""

    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "developer"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """What chat templates take."""
        parts = self.content if isinstance(self.content, list) else []
        text = "\n".join(part.text for part in parts) if parts or not isinstance(self.content, str) else self.content
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(Sampling):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1000)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens mean the same and differ; give one of them")
        return self

    def prompts(self) -> list[dict[str, Any]]:
        return [{"messages": [message.plain() for message in self.messages]}]

    def params(self) -> dict[str, Any]:
        found = super().params()
        found["max_tokens"] = self.max_completion_tokens or self.max_tokens
        return {**found, **({"logprobs": self.top_logprobs or 0} if self.logprobs else {})}
