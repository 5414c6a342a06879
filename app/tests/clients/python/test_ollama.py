"""ollama, the official client."""

import json
import math
import unittest

import ollama

from server import ADDRESS, MODEL, QUESTION

MESSAGES = [{"role": "user", "content": QUESTION}]
OPTIONS = {"num_predict": 16, "temperature": 0}


def client():
    return ollama.Client(host=ADDRESS)


class Answers(unittest.TestCase):
    def test_chat(self):
        answer = client().chat(model=MODEL, messages=MESSAGES, options=OPTIONS)
        self.assertTrue(answer.message.content)
        self.assertEqual((answer.done, answer.done_reason, answer.eval_count), (True, "length", 16))
        parts = list(client().chat(model=MODEL, messages=MESSAGES, options=OPTIONS, stream=True))
        self.assertEqual("".join(part.message.content for part in parts), answer.message.content)
        self.assertGreater(parts[-1].total_duration, 0)
        # The answer is valid as a message of the next request.
        more = MESSAGES + [answer.message, {"role": "user", "content": "Go on"}]
        client().chat(model=MODEL, messages=more, options=OPTIONS)

    def test_generate(self):
        answer = client().generate(model=MODEL, prompt=QUESTION, system="You tell stories.", options=OPTIONS)
        self.assertEqual((answer.done_reason, answer.eval_count), ("length", 16))
        parts = client().generate(
            model=MODEL, prompt=QUESTION, system="You tell stories.", options=OPTIONS, stream=True
        )
        self.assertEqual("".join(part.response for part in parts), answer.response)
        logprobs = client().generate(model=MODEL, prompt=QUESTION, options=OPTIONS, logprobs=True, top_logprobs=2)
        self.assertEqual(len(logprobs.logprobs), 16)

    def test_options_object(self):
        options = ollama.Options(num_predict=4, temperature=0, top_k=5, stop=["."], num_ctx=256)
        self.assertLessEqual(client().chat(model=MODEL, messages=MESSAGES, options=options).eval_count, 4)


    def test_format_and_tools(self):
        schema = {
            "type": "object", "properties": {"age": {"enum": [3, 30]}, "brave": {"type": "boolean"}},
            "required": ["age", "brave"], "additionalProperties": False,
        }
        options = {"num_predict": 200}
        for _ in range(3):
            answer = client().chat(model=MODEL, messages=MESSAGES, format=schema, options=options)
            self.assertIn(json.loads(answer.message.content)["age"], [3, 30])
            answer = client().generate(model=MODEL, prompt=QUESTION, format=schema, options=options)
            self.assertIn(json.loads(answer.response)["brave"], [True, False])

        def weather(city: str) -> str:
            """The weather in a city

            Args:
                city: which
            """
            return city

        answer = client().chat(model=MODEL, messages=MESSAGES, tools=[weather], options=OPTIONS)
        self.assertTrue(answer.done)

    def test_embeddings(self):
        answer = client().embed(model=MODEL, input=["A fox lost a key", "The sea is deep"])
        self.assertEqual(len(answer.embeddings), 2)
        self.assertAlmostEqual(math.hypot(*answer.embeddings[0]), 1, places=4)
        self.assertGreater(answer.prompt_eval_count, 2)
        older = client().embeddings(model=MODEL, prompt="A fox lost a key").embedding
        scale = math.hypot(*older)
        for a, b in zip(older, answer.embeddings[0]):
            self.assertAlmostEqual(a / scale, b, places=5)


class Models(unittest.TestCase):
    def test_list_show_ps(self):
        tags = client().list()
        self.assertIn(MODEL + ":latest", [model.model for model in tags.models])
        shown = client().show(MODEL)
        self.assertIn("completion", shown.capabilities)
        self.assertEqual(shown.modelinfo["general.architecture"], "llama")
        client().generate(model=MODEL, keep_alive="5m")
        self.assertEqual([model.name for model in client().ps().models], [MODEL + ":latest"])


class Errors(unittest.TestCase):
    def test_errors_are_the_clients_own(self):
        with self.assertRaises(ollama.ResponseError) as caught:
            client().chat(model="no-such-model", messages=MESSAGES)
        self.assertEqual(caught.exception.status_code, 404)
        self.assertIn("not found", caught.exception.error)
        with self.assertRaises(ollama.ResponseError) as caught:
            client().chat(model=MODEL, messages=MESSAGES, options={"mirostat": 1})
        self.assertIn("options.mirostat", caught.exception.error)


if __name__ == "__main__":
    unittest.main()
