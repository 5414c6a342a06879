"""openai, the official client."""

import asyncio
import json
import math
import typing
import unittest

import openai
import pydantic

from server import ADDRESS, MODEL, QUESTION

MESSAGES = [{"role": "user", "content": QUESTION}]


class Hero(pydantic.BaseModel):
    """What an answer is to be: small, so that a small model comes to its end."""

    age: typing.Literal[3, 30, 300]
    mood: typing.Literal["happy", "sad"]
    brave: bool


def client(**options):
    return openai.OpenAI(base_url=ADDRESS + "/v1", api_key="none", max_retries=0, **options)


class Chat(unittest.TestCase):
    def test_answer(self):
        answer = client().chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=16, temperature=0)
        self.assertEqual(answer.choices[0].finish_reason, "length")
        self.assertTrue(answer.choices[0].message.content)
        self.assertEqual(answer.usage.completion_tokens, 16)
        self.assertEqual(answer.usage.total_tokens, answer.usage.prompt_tokens + 16)
        self.assertTrue(answer._request_id.startswith("req_"))
        # The answer is valid as a message of the next request.
        more = MESSAGES + [answer.choices[0].message, {"role": "user", "content": "Go on"}]
        client().chat.completions.create(model=MODEL, messages=more, max_tokens=4)
        dumped = MESSAGES + [answer.choices[0].message.model_dump(), {"role": "user", "content": "Go on"}]
        client().chat.completions.create(model=MODEL, messages=dumped, max_tokens=4)

    def test_stream(self):
        options = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "temperature": 0}
        whole = client().chat.completions.create(**options).choices[0].message.content
        chunks = list(
            client().chat.completions.create(stream=True, stream_options={"include_usage": True}, **options)
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        self.assertEqual(text, whole)
        self.assertEqual(chunks[-1].usage.completion_tokens, 16)
        # The client's own way to put a stream together takes a cut answer for an error: this one ends by itself.
        options |= {"max_tokens": 200, "stop": "."}
        whole = client().chat.completions.create(**options).choices[0].message.content
        with client().chat.completions.stream(**options) as stream:
            for _ in stream:
                pass
            self.assertEqual(stream.get_final_completion().choices[0].message.content, whole)

    def test_many_answers_with_logprobs(self):
        answer = client().chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=8, n=3, seed=1, logprobs=True, top_logprobs=2, temperature=1
        )
        self.assertEqual([choice.index for choice in answer.choices], [0, 1, 2])
        for choice in answer.choices:
            self.assertEqual(len(choice.logprobs.content), 8)
            self.assertEqual(len(choice.logprobs.content[0].top_logprobs), 2)

    def test_stop_and_penalties(self):
        answer = client().chat.completions.create(
            model=MODEL, messages=MESSAGES, max_completion_tokens=64, stop=["."], frequency_penalty=0.5,
            presence_penalty=0.5, logit_bias={"5": -100}, top_p=0.9, user="somebody", temperature=0,
        )
        self.assertNotIn(".", answer.choices[0].message.content)

    def test_structured_output(self):
        answer = client().chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Hero)
        self.assertIsInstance(answer.choices[0].message.parsed, Hero)
        with client().chat.completions.stream(model=MODEL, messages=MESSAGES, response_format=Hero) as stream:
            for _ in stream:
                pass
            self.assertIsInstance(stream.get_final_completion().choices[0].message.parsed, Hero)
        response = client().responses.parse(model=MODEL, input=QUESTION, text_format=Hero)
        self.assertIsInstance(response.output_parsed, Hero)
        with self.assertRaises(openai.BadRequestError) as caught:
            client().chat.completions.create(
                model=MODEL, messages=MESSAGES,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}},
                },
            )
        self.assertEqual(caught.exception.param, "response_format")
        self.assertIn("uniqueItems", caught.exception.message)

    def test_tools(self):
        tool = openai.pydantic_function_tool(Hero, name="meet")
        options = {"model": MODEL, "messages": MESSAGES, "tools": [tool], "parallel_tool_calls": False}
        for choice in ["required", {"type": "function", "function": {"name": "meet"}}]:
            answer = client().chat.completions.parse(**options, tool_choice=choice)
            (call,) = answer.choices[0].message.tool_calls
            self.assertIsInstance(call.function.parsed_arguments, Hero)
            # The answer is valid as a message of the next request, with its result.
            more = MESSAGES + [
                answer.choices[0].message.model_dump(exclude={"parsed"}, exclude_none=True),
                {"role": "tool", "tool_call_id": call.id, "content": "hello"},
            ]
            for said in more[-2].get("tool_calls", []):
                said["function"].pop("parsed_arguments", None)
            client().chat.completions.create(model=MODEL, messages=more, max_tokens=4, tools=[tool])
        chunks = client().chat.completions.create(**options, tool_choice="required", stream=True)
        parts = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        self.assertEqual(parts[0].function.name, "meet")
        Hero.model_validate_json("".join(part.function.arguments or "" for part in parts))
        function = tool["function"] | {"type": "function"}
        response = client().responses.create(
            model=MODEL, input=QUESTION, tools=[function], tool_choice="required", parallel_tool_calls=False
        )
        Hero.model_validate(json.loads(response.output[0].arguments))

    def test_async_clients_at_once(self):
        async def ask(asynchronous, seed):
            stream = await asynchronous.chat.completions.create(
                model=MODEL, messages=MESSAGES, max_tokens=16, seed=seed, temperature=1, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async def ask_all():
            async with openai.AsyncOpenAI(base_url=ADDRESS + "/v1", api_key="none") as asynchronous:
                return await asyncio.gather(*(ask(asynchronous, seed) for seed in list(range(8)) * 2))

        answers = asyncio.run(ask_all())
        self.assertEqual(answers[:8], answers[8:])

    def test_errors(self):
        def refused(**options):
            options = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4} | options
            with self.assertRaises(openai.APIStatusError) as caught:
                client().chat.completions.create(**options)
            return caught.exception

        missing = refused(model="gpt-5")
        self.assertIsInstance(missing, openai.NotFoundError)
        self.assertEqual(missing.code, "model_not_found")
        unknown = refused(extra_body={"temprature": 1})
        self.assertIsInstance(unknown, openai.BadRequestError)
        self.assertEqual((unknown.code, unknown.param), ("unknown_parameter", "temprature"))
        hot = refused(temperature=-1)
        self.assertEqual((hot.type, hot.param), ("invalid_request_error", "temperature"))
        self.assertEqual(refused(messages=[{"role": "user", "content": "word " * 100_000}]).code,
                         "context_length_exceeded")


class Others(unittest.TestCase):
    def test_models(self):
        self.assertEqual([model.id for model in client().models.list()], [MODEL])
        self.assertEqual(client().models.retrieve(MODEL).owned_by, "paguro")

    def test_completions(self):
        options = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        whole = client().completions.create(**options, logprobs=2)
        self.assertEqual(len(whole.choices[0].logprobs.tokens), 8)
        parts = client().completions.create(**options, stream=True)
        self.assertEqual("".join(part.choices[0].text for part in parts), whole.choices[0].text)

    def test_embeddings(self):
        texts = ["A fox lost a key", "The sea is deep"]
        # The client asks for base64 by itself, and reads it.
        answer = client().embeddings.create(model=MODEL, input=texts)
        plain = client().embeddings.create(model=MODEL, input=texts, encoding_format="float")
        self.assertEqual([item.index for item in answer.data], [0, 1])
        self.assertEqual(answer.usage.prompt_tokens, answer.usage.total_tokens)
        for a, b in zip(answer.data, plain.data):
            self.assertLess(max(abs(x - y) for x, y in zip(a.embedding, b.embedding)), 1e-6)
            self.assertAlmostEqual(math.hypot(*a.embedding), 1, places=4)
        short = client().embeddings.create(model=MODEL, input=texts[0], dimensions=8)
        self.assertEqual(len(short.data[0].embedding), 8)
        with self.assertRaises(openai.BadRequestError) as caught:
            client().embeddings.create(model=MODEL, input=texts[0], dimensions=100_000)
        self.assertEqual(caught.exception.param, "dimensions")

    def test_responses(self):
        options = {"model": MODEL, "max_output_tokens": 16, "temperature": 0}
        first = client().responses.create(input=QUESTION, **options)
        self.assertTrue(first.output_text)
        second = client().responses.create(input="Go on", previous_response_id=first.id, **options)
        again = client().responses.create(
            input=[{"role": "user", "content": QUESTION}, *first.output, {"role": "user", "content": "Go on"}], **options
        )
        self.assertEqual(second.output_text, again.output_text)
        self.assertEqual(client().responses.retrieve(first.id).output_text, first.output_text)
        with client().responses.stream(input=QUESTION, **options) as stream:
            events = list(stream)
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        # 16 tokens are not the whole story, and the last event says so.
        self.assertEqual(events[-1].type, "response.incomplete")
        self.assertEqual(events[-1].response.output_text, text)
        self.assertEqual(text, first.output_text)
        client().responses.delete(first.id)
        with self.assertRaises(openai.NotFoundError):
            client().responses.retrieve(first.id)


if __name__ == "__main__":
    unittest.main()
