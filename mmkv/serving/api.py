"""The bodies of requests to OpenAI's API: fields, checks, and what the engine is to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mmkv.serving import choose, tools
from mmkv.serving.errors import Body, RequestError
from mmkv.serving.reply import MOST_LOGPROBS, Sampling

if TYPE_CHECKING:
    from PIL import Image

_MAX_REPLIES = 128
# Fields of a request that `Sampling` takes unchanged.
_SAMPLING_FIELDS = (
    *("temperature", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


class _TextPart(Body):
    type: Literal["text"]
    text: str


class _ImageURL(Body):
    url: str
    detail: Literal["auto", "low", "high"] | None = None  # without effect


class _ImagePart(Body):
    type: Literal["image_url"]
    image_url: _ImageURL


class _Named(Body):
    name: str


class _CalledFunction(_Named):
    arguments: str  # JSON


class _ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _CalledFunction


class _Function(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class _Tool(Body):
    type: Literal["function"]
    function: _Function


class _NamedTool(Body):
    type: Literal["function"]
    function: _Named


class _JSONSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None  # without effect: every schema is enforced


class _ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JSONSchema | None = None


class Message(Body):
    """One turn. Fields besides the text that OpenAI's answers have are accepted where empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Annotated[_TextPart | _ImagePart, Field(discriminator="type")]] | None = (
        None
    )
    type: Literal["text", "message"] | None = None  # lm-evaluation-harness sends it
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_ToolCall] | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None


def _check_messages(messages: list[Message]) -> list[Message]:
    """Refuse messages whose fields contradict each other."""
    for i, message in enumerate(messages):
        place, problem, content = f"messages[{i}]", None, message.content
        if content is None and message.role != "assistant":
            problem = f"{place}.content is null: give a text"
        if message.tool_calls and message.role != "assistant":
            problem = f"{place}.tool_calls: only an assistant's message has them"
        if message.role != "user" and any(isinstance(x, _ImagePart) for x in content or ()):
            problem = f"{place}: pictures can only be in messages of the user"
        if problem is not None:
            raise RequestError(problem, param=place)
    return messages


Messages = Annotated[list[Message], Field(min_length=1), AfterValidator(_check_messages)]


class _StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against eavesdroppers: without effect


class _Compression(Body):
    policy: str | None = None
    budget: int | float | None = None
    options: dict[str, bool | int | float | str | None] | None = None


def _stop_texts(stop: Any) -> Any:
    """Return the stop texts as a list, without nulls."""
    texts = [x for x in (stop if isinstance(stop, list) else [stop]) if x is not None]
    if "" in texts:
        raise RequestError("stop: an empty text would end every answer", param="stop")
    return texts


class _TextRequest(Body):
    """Fields that chats and completions share."""

    model: str
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[str], Field(max_length=16), BeforeValidator(_stop_texts)] = Field(
        default_factory=list[str]
    )
    n: Annotated[int, Field(ge=1, le=_MAX_REPLIES)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    mmkv: _Compression = _Compression()

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options and not self.stream:
            raise RequestError("stream_options: only with stream=true", param="stream_options")
        return self

    def sampling(self, i: int, **options: Any) -> Sampling:
        """Return the sampling of the i-th reply to a prompt; keys of `logit_bias` are ids."""
        try:
            biases = {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        except ValueError:
            raise RequestError("logit_bias: expected ids of tokens", param="logit_bias") from None
        return Sampling(
            **{name: x for name in _SAMPLING_FIELDS if (x := getattr(self, name)) is not None},
            top_k=max(0, self.top_k or 0),
            seed=(self.seed + i) % 2**63 if i and self.seed is not None else self.seed,
            stop=tuple(self.stop),
            logit_bias=biases,
            **options,
        )


class CompletionRequest(_TextRequest):
    """A request to continue a text or tokens, or several of these."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    def replies(self, pictures: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Return the arguments of `Engine.submit`, once for each choice of the answer."""
        prompt, n, max_new_tokens = self.prompt, self.n or 1, self.max_tokens
        single = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
        prompts: list[Any] = [prompt] if single else list(prompt)
        if max_new_tokens == 0 and not self.echo:
            raise RequestError("max_tokens: 0 asks for nothing without echo", param="max_tokens")
        if self.best_of not in (None, 1, n):
            raise RequestError("best_of: answers are not compared, leave it out", param="best_of")
        if len(prompts) * n > _MAX_REPLIES:
            message = f"prompt: at most {_MAX_REPLIES} replies a request, send some apart"
            raise RequestError(message, param="prompt")
        options = {"logprobs": self.logprobs, "echo": bool(self.echo)}
        return [
            {"prompt": x, "sampling": self.sampling(i, **options), "max_new_tokens": max_new_tokens}
            for x in prompts
            for i in range(n)
        ]


class _Templated(Body):
    tools: list[_Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The tools that the model may call, in the form of chat templates."""
        unused = getattr(self, "tool_choice", None) == "none"
        return [] if unused else [x.model_dump(exclude_none=True) for x in self.tools or ()]

    @property
    def template(self) -> dict[str, Any]:
        """The variables of the chat template besides the messages."""
        variables = {"tools": self.callable} if self.callable else {}
        return {**(self.chat_template_kwargs or {}), **variables}


class ChatRequest(_TextRequest, _Templated):
    """A request to answer a conversation."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: _ResponseFormat | None = None
    tool_choice: Literal["none", "auto", "required"] | _NamedTool | None = None
    parallel_tool_calls: bool | None = None  # false: at most one call an answer

    @property
    def grammar(self) -> str | None:
        """The grammar that the reply must match; a tool that must be called must be given."""
        if self.tool_choice == "required" or isinstance(self.tool_choice, _NamedTool):
            required = None if self.tool_choice == "required" else self.tool_choice.function.name
            functions = [x["function"] for x in self.callable]
            allowed = [x for x in functions if required in (None, x["name"])]
            if not allowed:
                raise RequestError("tool_choice: no such tool is given", param="tool_choice")
            return choose.json_grammar(tools.call_schema(allowed))
        format_ = self.response_format
        if format_ is None:
            return None
        schema = None if format_.json_schema is None else format_.json_schema.schema_
        if (schema is not None) != (format_.type == "json_schema"):
            message = (
                "response_format: json_schema.schema goes with type='json_schema', and only it"
            )
            raise RequestError(message, param="response_format")
        if format_.type == "text":
            return None
        return choose.json_grammar({"type": "object"} if schema is None else schema)

    def replies(self, pictures: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Return the arguments of `Engine.submit`, once for each choice of the answer."""
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        shared: dict[str, Any] = {
            "messages": messages(self.messages, pictures),
            "max_new_tokens": self.max_completion_tokens or self.max_tokens,
            "template": self.template,
        }
        options = {"logprobs": logprobs, "grammar": self.grammar}
        return [{**shared, "sampling": self.sampling(i, **options)} for i in range(self.n or 1)]


class TokenizeRequest(_Templated):
    """A request for the tokens of a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None


def picture_urls(messages: Sequence[Message]) -> list[str]:
    """Return the URLs of the pictures, in the order of the messages."""
    parts = [part for message in messages for part in message.content or ()]
    return [part.image_url.url for part in parts if isinstance(part, _ImagePart)]


def messages(turns: Sequence[Message], pictures: Sequence[Image.Image]) -> list[dict[str, Any]]:
    """Return messages in the form of chat templates, with the pictures of `picture_urls`."""
    remaining, chat_messages = iter(pictures), list[dict[str, Any]]()
    for message in turns:
        role = "system" if message.role == "developer" else message.role
        content: Any = message.content or ""
        if not isinstance(content, str):
            content = [
                {"type": "text", "text": part.text}
                if isinstance(part, _TextPart)
                else {"type": "image", "image": next(remaining)}
                for part in content
            ]
            if all(part["type"] == "text" for part in content):
                content = "\n".join(part["text"] for part in content)
        chat_message = {"role": role, "content": content}
        if message.role == "tool":
            chat_message |= {"tool_call_id": message.tool_call_id, "name": message.name}
        if message.tool_calls:
            chat_message["tool_calls"] = [
                {"type": "function", "id": x.id, "function": tools.as_object(x.function)}
                for x in message.tool_calls
            ]
        chat_messages.append({k: x for k, x in chat_message.items() if x is not None})
    return chat_messages
