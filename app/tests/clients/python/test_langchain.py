"""langchain-openai, which most programs that use LangChain have."""

import unittest

from langchain_openai import ChatOpenAI

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


if __name__ == "__main__":
    unittest.main()
