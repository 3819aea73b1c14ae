"""Bodies of /v1/embeddings, /pooling, /classify, /score and /rerank: the fields of OpenAI, vLLM, Cohere and Jina."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.common.params.pooling import Side
from quire.server.api.chat.protocol import ChatMessage
from quire.server.api.shared.fields import Prompts, Usage

EmbedDType = Literal["float32", "float16", "bfloat16"]
Endianness = Literal["native", "little", "big"]


class PoolingFields(msgspec.Struct, kw_only=True):
    """Fields that requests of all these endpoints may have. None stands for the model's default."""

    model: str | None = None
    user: str | None = None
    """The user of the request, for fair scheduling; by default the API key's name."""
    truncate_prompt_tokens: int | None = None
    """Keep this number of tokens of each text; -1: what the model can take."""
    truncation_side: Side | None = None
    """The end at which longer texts are cut. Default: what the checkpoint's tokenizer says, mostly `right`."""
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    use_activation: bool | None = None
    """Whether embeddings are normalized, and scores and classes are probabilities; false returns the raw numbers."""
    activation: bool | None = None
    """An older name of `use_activation`."""
    softmax: bool | None = None
    """The oldest name of `use_activation`."""
    request_id: str | None = None


class InputFields(PoolingFields, kw_only=True):
    """Fields of requests with a list of independent texts, or with one conversation."""

    input: Prompts | None = None
    messages: list[ChatMessage] | None = None
    """A conversation in the place of `input`, rendered by the model's chat template."""
    add_generation_prompt: bool | None = None
    """Default: false, unlike in chats, since no answer follows."""
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class VectorFields(InputFields, kw_only=True):
    """Fields of requests that are answered with vectors."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    """Default: `float`, numbers. `base64`: the bytes of a vector's numbers. `bytes`: the body consists of the bytes of
    all vectors, and the header `metadata` says where each is; `bytes_only`: the same without the header."""
    embed_dtype: EmbedDType | None = None
    """Type of numbers that are sent as bytes. Default: float32."""
    endianness: Endianness | None = None
    """Order of the bytes. Default: native."""
    dimensions: int | None = None
    normalize: bool | None = None
    """An older name of `use_activation`, for embeddings."""


class EmbeddingRequest(VectorFields, kw_only=True):
    """Texts to be embedded."""


class PoolingRequest(VectorFields, kw_only=True):
    """Texts to be pooled, for any task of the model."""

    task: Literal["embed", "classify", "score", "token_embed", "token_classify"] | None = None
    """Default: the model's first task."""


class ClassificationRequest(InputFields, kw_only=True):
    """Texts to be classified."""


class ListResponse(msgspec.Struct, kw_only=True):
    """What the answers with a row for each text have in common."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Any]
    usage: Usage


class BytesData(msgspec.Struct, kw_only=True):
    """Where one text's vector is in a body of bytes."""

    index: int
    embed_dtype: EmbedDType
    endianness: Endianness
    start: int
    end: int
    shape: list[int]


class EmbeddingData(msgspec.Struct, kw_only=True):
    """The embedding of one text."""

    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str


class EmbeddingResponse(ListResponse, kw_only=True):
    """All embeddings, in the order of the texts."""

    data: list[EmbeddingData]


class PoolingData(msgspec.Struct, kw_only=True):
    """What was pooled from one text: a vector, or one for each token."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float | list[float]] | str


class PoolingResponse(ListResponse, kw_only=True):
    """All vectors, in the order of the texts."""

    data: list[PoolingData]


class ClassificationData(msgspec.Struct, kw_only=True):
    """The classes of one text."""

    index: int
    label: str
    """The name of the likeliest class."""
    probs: list[float]
    num_classes: int


class ClassificationResponse(ListResponse, kw_only=True):
    """All classes, in the order of the texts."""

    data: list[ClassificationData]


Texts = str | list[str]


class PairFields(PoolingFields, kw_only=True):
    """Fields of requests with pairs of texts."""

    chat_template: str | None = None
    """A template that makes one text of a pair, from messages of the roles `query` and `document`."""
    chat_template_kwargs: dict[str, Any] | None = None
    instruction: str | None = None
    """A variable of the template."""
    max_tokens_per_query: int | None = None
    """vLLM's limit on the tokens of a first text: the rest is cut off."""
    max_tokens_per_doc: int | None = None
    """Cohere's limit on the tokens of a second text: the rest is cut off."""


class ScoreRequest(PairFields, kw_only=True):
    """Texts to be compared: one with one or with each of several, or pairs. Exactly one name of each side is given."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    """vLLM's newer name of `text_1`."""
    documents: Texts | None = None
    """vLLM's newer name of `text_2`."""
    items: Texts | None = None


class ScoreData(msgspec.Struct, kw_only=True):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(ListResponse, kw_only=True):
    """All scores, in the order of the pairs."""

    data: list[ScoreData]


class Document(msgspec.Struct, kw_only=True):
    """A document with fields, of which the text counts."""

    text: str


class RerankRequest(PairFields, kw_only=True):
    """Documents to be put in the order of their relevance to a query."""

    query: str
    documents: str | list[str | Document]
    top_n: int | None = None
    """The number of documents that are returned, the most relevant ones; None or 0: all."""
    return_documents: bool | None = None
    """Whether results contain the documents' texts. Default: yes, except for /v2/rerank."""


class RerankResult(msgspec.Struct, kw_only=True):
    """One document's place in the order."""

    index: int
    """Its index in the request."""
    document: Document | UnsetType = UNSET
    relevance_score: float


class CohereEmbedRequest(PoolingFields, kw_only=True):
    """Texts to be embedded, as Cohere's clients send them."""

    texts: list[str]
    input_type: str | None = None
    """What the texts are for. A prompt of the model's with this name is put before them."""
    embedding_types: list[Literal["float", "base64", "binary", "ubinary"]] | None = None
    """Default: numbers, which /v1/embed then returns without their form's name. `ubinary`: eight signs in each byte,
    the first in its highest bit, where 0 is a negative one; `binary`: these bytes less 128."""
    output_dimension: int | None = None
    max_tokens: int | None = None
    """Keep this number of tokens of each text."""
    truncate: Literal["NONE", "START", "END"] | None = None
    """What becomes of texts that are longer than the model takes: they are refused, or their start or end is cut off.
    Default: the end."""


class CohereEmbeddings(msgspec.Struct, kw_only=True):
    """The embeddings in the forms that were asked for."""

    numbers: list[list[float]] | UnsetType = msgspec.field(default=UNSET, name="float")
    base64: list[str] | UnsetType = UNSET
    binary: list[list[int]] | UnsetType = UNSET
    ubinary: list[list[int]] | UnsetType = UNSET


class ApiVersion(msgspec.Struct, kw_only=True):
    """The version of Cohere's API."""

    version: Literal["1", "2"] = "2"


class BilledUnits(msgspec.Struct, kw_only=True):
    """What Cohere's service would count."""

    search_units: int | UnsetType = UNSET
    input_tokens: int | UnsetType = UNSET


class CohereMeta(msgspec.Struct, kw_only=True):
    """Cohere's description of a response."""

    api_version: ApiVersion
    billed_units: BilledUnits


class RerankResponse(msgspec.Struct, kw_only=True):
    """The documents, most relevant first."""

    id: str
    model: str
    usage: Usage
    results: list[RerankResult]
    meta: CohereMeta | UnsetType = UNSET


class CohereEmbedResponse(msgspec.Struct, kw_only=True):
    """All embeddings, in the order of the texts."""

    id: str
    response_type: Literal["embeddings_by_type", "embeddings_floats"]
    embeddings: CohereEmbeddings | list[list[float]]
    """`embeddings_floats`: the vectors alone, as numbers."""
    texts: list[str]
    meta: CohereMeta
