"""What clients send: OpenAI's completions and chat completions, and our settings beside them.

Fields that would change an answer in a way that is not supported are refused unless they are neutral; those that
cannot change it, such as `user`, are accepted and ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _in_unicode(text: str) -> str:
    """JSON can contain half of a character, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeError:
        raise ValueError("should be text in Unicode") from None
    return text


Text = Annotated[str, AfterValidator(_in_unicode)]
Neutral = Annotated[float, Field(ge=0, le=0)]  # a penalty, which is not supported
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
StopString = Annotated[Text, Field(min_length=1, max_length=256)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StickyOptions(_Body):
    """How experts are held and loaded for one answer, and whether events show it. By default as the server started."""

    slots: Annotated[int, Field(ge=1, le=100_000)] | None = None
    policy: Annotated[str, Field(max_length=64)] | None = None
    prefetch: Literal["none", "previous", "next_layer"] | None = None
    throttle: Annotated[float, Field(gt=0, le=1e15)] | Annotated[str, Field(max_length=32)] | None = Field(
        default=None, description="bytes per second of a simulated slow memory, such as 50000000 or '50MB'"
    )
    cold: bool = Field(default=False, description="start with empty slots")
    routes: bool = Field(default=False, description="report experts and loads of every token, and keep the trace")


class StreamOptions(_Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Generation(_Body):
    model: Annotated[str, Field(max_length=512)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        default=None, description="0: the most likely token"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] | None = Field(default=None, description="0: all tokens")
    seed: Int64 | None = None
    n: Literal[1] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stickymoe: StickyOptions | None = None
    frequency_penalty: Neutral | None = None
    presence_penalty: Neutral | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    user: str | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class CompletionBody(_Generation):
    """POST /v1/completions."""

    prompt: Text | list[Text] | list[Int64] | list[list[Int64]]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None


class TextPart(_Body):
    type: Literal["text"]
    text: Text


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(_Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=1024)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=0)] | None = None
    tool_choice: Literal["none"] | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """An error in OpenAI's shape."""

    error: ErrorDetail
