"""LlamaIndex: embeddings of texts and of a query, one by one, many at once, and asynchronous."""

import asyncio

from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from target import KEY, MODEL, URL, report

TEXTS = ["json.dumps", "os.replace renames a file", "the sum of a list"]
embedder = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{URL}/v1", api_key=KEY, embed_batch_size=64)

report(
    texts=embedder.get_text_embedding_batch(TEXTS * 30)[-3:],
    query=embedder.get_query_embedding(TEXTS[1]),
    asynchronous=asyncio.run(embedder.aget_text_embedding_batch(TEXTS)),
)
