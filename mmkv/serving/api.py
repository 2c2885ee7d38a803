"""What a client of OpenAI's completions may ask for: the bodies of requests, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mmkv.serving import choose, tools
from mmkv.serving.errors import Body, RequestError
from mmkv.serving.reply import MOST_LOGPROBS, Sampling

if TYPE_CHECKING:
    from PIL import Image

_MOST_REPLIES = 128
# Of a request, that are handed on as they are.
_NUMBERS = (
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
    schema_: dict[str, Any] = Field(default_factory=dict[str, Any], alias="schema")
    strict: bool | None = None  # it is held in any case


class _ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JSONSchema | None = None


class Message(Body):
    """One turn. What an answer of OpenAI's holds beside its text is taken where it is empty."""

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


def _checked(given: list[Message]) -> list[Message]:
    """Refuse messages whose fields do not go together."""
    for i, message in enumerate(given):
        place, told, content = f"messages[{i}]", None, message.content
        if content is None and message.role != "assistant":
            told = f"{place}.content is null: give a text"
        if message.tool_calls and message.role != "assistant":
            told = f"{place}.tool_calls: only an assistant's message has them"
        if message.role != "user" and any(isinstance(x, _ImagePart) for x in content or ()):
            told = f"{place}: pictures can only be in messages of the user"
        if told is not None:
            raise RequestError(told, param=place)
    return given


Messages = Annotated[list[Message], Field(min_length=1), AfterValidator(_checked)]


class _StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against eavesdroppers: it is not done


class _Compression(Body):
    policy: str | None = None
    budget: int | float | None = None
    options: dict[str, bool | int | float | str | None] | None = None


def _texts(given: Any) -> Any:
    """Stop texts as a list; what is null in it asks for nothing."""
    if isinstance(given, str) or given is None:
        given = [given]
    found = [x for x in given if x is not None] if isinstance(given, list) else given
    if found and "" in found:
        raise RequestError("stop: an empty text would end every answer", param="stop")
    return found


class _Asked(Body):
    """What all requests for text have."""

    model: str
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[str], Field(max_length=16), BeforeValidator(_texts)] = Field(
        default_factory=list[str]
    )
    n: Annotated[int, Field(ge=1, le=_MOST_REPLIES)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    mmkv: _Compression = _Compression()

    @model_validator(mode="after")
    def _streams(self) -> Self:
        if self.stream_options and not self.stream:
            raise RequestError("stream_options: only with stream=true", param="stream_options")
        return self

    def sampling(self, i: int, **more: Any) -> Sampling:
        """How the tokens of the i-th reply to one prompt are chosen; a bias must be of a token."""
        try:
            biases = {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        except ValueError:
            raise RequestError("logit_bias: expected ids of tokens", param="logit_bias") from None
        return Sampling(
            **{name: x for name in _NUMBERS if (x := getattr(self, name)) is not None},
            top_k=max(0, self.top_k or 0),
            seed=(self.seed + i) % 2**63 if i and self.seed is not None else self.seed,
            stop=tuple(self.stop),
            logit_bias=biases,
            **more,
        )


class CompletionRequest(_Asked):
    """A text to go on with, or several; tokens are taken too."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    def replies(self, pictures: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """What the engine is asked, one for each choice of the answer."""
        given = self.prompt
        one = isinstance(given, str) or not given or isinstance(given[0], int)
        prompts: list[Any] = [given] if one else list(given)
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens: 0 asks for nothing without echo", param="max_tokens")
        if self.best_of not in (None, 1, self.n or 1):
            raise RequestError("best_of: answers are not compared, leave it out", param="best_of")
        if len(prompts) * (self.n or 1) > _MOST_REPLIES:
            told = f"prompt: at most {_MOST_REPLIES} replies a request, send some apart"
            raise RequestError(told, param="prompt")
        more = {"logprobs": self.logprobs, "echo": bool(self.echo)}
        n, longest = self.n or 1, self.max_tokens
        return [
            {"prompt": x, "sampling": self.sampling(i, **more), "max_new_tokens": longest}
            for x in prompts
            for i in range(n)
        ]


class _Templated(Body):
    tools: list[_Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The tools that the model may use, as chat templates take them."""
        unused = getattr(self, "tool_choice", None) == "none"
        return [] if unused else [x.model_dump(exclude_none=True) for x in self.tools or ()]

    @property
    def template(self) -> dict[str, Any]:
        """What the chat template is given beside the messages."""
        given = {"tools": self.callable} if self.callable else {}
        return {**(self.chat_template_kwargs or {}), **given}


class ChatRequest(_Asked, _Templated):
    """A conversation to be answered."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: _ResponseFormat | None = None
    tool_choice: Literal["none", "auto", "required"] | _NamedTool | None = None

    @property
    def grammar(self) -> str | None:
        """What the text has to match; a tool that has to be called must be there."""
        if self.tool_choice == "required" or isinstance(self.tool_choice, _NamedTool):
            named = None if self.tool_choice == "required" else self.tool_choice.function.name
            given = [x["function"] for x in self.callable]
            among = [x for x in given if named in (None, x["name"])]
            if not among:
                raise RequestError("tool_choice: no such tool is given", param="tool_choice")
            return choose.json_grammar(tools.call_schema(among))
        form = self.response_format
        if form is None or form.type == "text":
            return None
        schema = form.json_schema.schema_ if form.json_schema else {}
        return choose.json_grammar({"type": "object"} if form.type == "json_object" else schema)

    def replies(self, pictures: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """What the engine is asked, one for each choice of the answer."""
        likely = (self.top_logprobs or 0) if self.logprobs else None
        shared: dict[str, Any] = {
            "messages": messages(self.messages, pictures),
            "max_new_tokens": self.max_completion_tokens or self.max_tokens,
        }
        if self.template:
            shared["template"] = self.template
        more = {"logprobs": likely, "grammar": self.grammar}
        return [{**shared, "sampling": self.sampling(i, **more)} for i in range(self.n or 1)]


class TokenizeRequest(_Templated):
    """A text or a conversation whose tokens are asked for."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None


def picture_urls(given: Sequence[Message]) -> list[str]:
    """Where the pictures are, in the order of the messages."""
    parts = [part for message in given for part in message.content or ()]
    return [part.image_url.url for part in parts if isinstance(part, _ImagePart)]


def messages(given: Sequence[Message], pictures: Sequence[Image.Image]) -> list[dict[str, Any]]:
    """The messages as a chat template takes them, with the pictures of `picture_urls` in place."""
    left, found = iter(pictures), list[dict[str, Any]]()
    for message in given:
        role = "system" if message.role == "developer" else message.role
        content: Any = message.content or ""
        if not isinstance(content, str):
            content = [
                {"type": "text", "text": part.text}
                if isinstance(part, _TextPart)
                else {"type": "image", "image": next(left)}
                for part in content
            ]
            if all(part["type"] == "text" for part in content):
                content = "\n".join(part["text"] for part in content)
        one = {"role": role, "content": content}
        if message.role == "tool":
            one |= {"tool_call_id": message.tool_call_id, "name": message.name}
        if message.tool_calls:
            one["tool_calls"] = [
                {"type": "function", "id": x.id, "function": tools.as_object(x.function)}
                for x in message.tool_calls
            ]
        found.append({k: x for k, x in one.items() if x is not None})
    return found
