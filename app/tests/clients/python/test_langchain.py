"""langchain-openai, which most programs that use LangChain have."""

import unittest

import typing

import pydantic
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from server import ADDRESS, MODEL, QUESTION


def chat(**options):
    return ChatOpenAI(base_url=ADDRESS + "/v1", api_key="none", model=MODEL, temperature=0, max_tokens=16, **options)


class LangChain(unittest.TestCase):
    def test_answer(self):
        answer = chat().invoke([("system", "You tell stories."), ("human", QUESTION)])
        self.assertTrue(answer.content)
        self.assertEqual(answer.usage_metadata["output_tokens"], 16)

    def test_stream(self):
        whole = chat().invoke(QUESTION).content
        self.assertEqual("".join(chunk.content for chunk in chat().stream(QUESTION)), whole)

    def test_batch(self):
        self.assertEqual(len(chat().batch([QUESTION, "Once upon a time"])), 2)

    def test_structured_output_and_tools(self):
        class Hero(pydantic.BaseModel):
            """The hero of a story."""

            age: typing.Literal[3, 30, 300]
            brave: bool

        model = ChatOpenAI(base_url=ADDRESS + "/v1", api_key="none", model=MODEL, max_tokens=200)
        for method in ["json_schema", "function_calling"]:
            hero = model.with_structured_output(Hero, method=method).invoke(QUESTION)
            self.assertIsInstance(hero, Hero)
        answer = model.bind_tools([Hero], tool_choice="any", parallel_tool_calls=False).invoke(QUESTION)
        (call,) = answer.tool_calls
        Hero.model_validate(call["args"])

    def test_embeddings(self):
        # Otherwise it would fetch another model's tokenizer, to count tokens with.
        embeddings = OpenAIEmbeddings(
            base_url=ADDRESS + "/v1", api_key="none", model=MODEL, check_embedding_ctx_length=False
        )
        vectors = embeddings.embed_documents(["A fox lost a key", "The sea is deep"])
        self.assertEqual(len(vectors), 2)
        self.assertEqual(embeddings.embed_query("A fox lost a key"), vectors[0])


if __name__ == "__main__":
    unittest.main()
