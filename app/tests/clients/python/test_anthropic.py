"""anthropic, the official client."""

import unittest

import anthropic

from server import ADDRESS, MODEL, QUESTION

MESSAGES = [{"role": "user", "content": QUESTION}]
WEATHER = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def client(**options):
    return anthropic.Anthropic(base_url=ADDRESS, api_key="none", max_retries=0, **options)


class Messages(unittest.TestCase):
    def test_answer(self):
        message = client().messages.create(
            model=MODEL, max_tokens=16, messages=MESSAGES, system="You tell stories.", extra_body={"temperature": 0}
        )
        self.assertEqual((message.type, message.role, message.stop_reason), ("message", "assistant", "max_tokens"))
        self.assertTrue(message.content[0].text)
        self.assertEqual(message.usage.output_tokens, 16)
        self.assertTrue(message._request_id.startswith("req_"))
        # The answer is valid as a message of the next request.
        more = MESSAGES + [message.to_param(), {"role": "user", "content": "Go on"}]
        client().messages.create(model=MODEL, max_tokens=2, messages=more)

    def test_stream(self):
        options = {"model": MODEL, "max_tokens": 16, "messages": MESSAGES, "extra_body": {"temperature": 0}}
        whole = client().messages.create(**options)
        with client().messages.stream(**options) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        self.assertEqual(text, whole.content[0].text)
        self.assertEqual((final.stop_reason, final.usage.output_tokens), ("max_tokens", 16))
        self.assertEqual(final.content[0].text, text)

    def test_stop_sequences(self):
        message = client().messages.create(
            model=MODEL, max_tokens=64, messages=MESSAGES, stop_sequences=["."], extra_body={"temperature": 0}
        )
        self.assertEqual((message.stop_reason, message.stop_sequence), ("stop_sequence", "."))
        self.assertNotIn(".", message.content[0].text)

    def test_count_tokens(self):
        count = client().messages.count_tokens(model=MODEL, messages=MESSAGES)
        message = client().messages.create(model=MODEL, max_tokens=1, messages=MESSAGES)
        usage = message.usage
        self.assertEqual(count.input_tokens, usage.input_tokens + usage.cache_read_input_tokens)

    def test_results_of_tools_are_read(self):
        call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Roma"}}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Sunny"}]}
        messages = MESSAGES + [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        message = client().messages.create(model=MODEL, max_tokens=4, messages=messages, tools=[WEATHER])
        self.assertEqual(message.usage.output_tokens, 4)


    def test_tools_are_called(self):
        for choice in [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}]:
            message = client().messages.create(
                model=MODEL, max_tokens=200, messages=MESSAGES, tools=[WEATHER], tool_choice=choice
            )
            self.assertEqual((message.stop_reason, message.content[0].name), ("tool_use", "weather"))
            self.assertLessEqual(len(message.content[0].input["city"]), 12)
        with client().messages.stream(
            model=MODEL, max_tokens=200, messages=MESSAGES, tools=[WEATHER],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        ) as stream:
            final = stream.get_final_message()
        self.assertTrue(all(block.type == "tool_use" for block in final.content))


class Errors(unittest.TestCase):
    def test_errors_are_the_clients_own(self):
        with self.assertRaises(anthropic.NotFoundError) as caught:
            client().messages.create(model="no-such-model", max_tokens=4, messages=MESSAGES)
        self.assertEqual(caught.exception.body["error"]["type"], "not_found_error")
        with self.assertRaises(anthropic.BadRequestError) as caught:
            client().messages.create(model=MODEL, max_tokens=4, messages=MESSAGES, extra_body={"temprature": 1})
        self.assertIn("`temprature`", caught.exception.body["error"]["message"])


if __name__ == "__main__":
    unittest.main()
