"""Images through the official clients of OpenAI, Anthropic and Ollama: answers of the trained model equal its reference."""

import base64
import json
import os
import pathlib
import unittest

import anthropic
import ollama
import openai

from server import start

FOLDER = pathlib.Path(os.environ.get("PAGURO_SEES", ""), "reference")
NAME = "qwen3vl-hf"


@unittest.skipUnless((FOLDER / "reference.json").exists(), "no model that sees")
class Images(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.address = start(str(FOLDER.parent), "--device", "cpu")
        cls.references = json.loads((FOLDER / "reference.json").read_text())[:16]

    def each(self, ask):
        for entry in self.references:
            pictures = [FOLDER / name for name in entry["pictures"]]
            with self.subTest(entry["question"]):
                self.assertEqual(ask(entry["question"], pictures), entry["answer"])

    def encoded(self, pictures):
        return [base64.b64encode(path.read_bytes()).decode() for path in pictures]

    def test_openai_chat(self):
        client = openai.OpenAI(base_url=self.address + "/v1", api_key="none", max_retries=0)

        def ask(question, pictures):
            images = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", "detail": "auto"}} for data in self.encoded(pictures)]
            messages = [{"role": "user", "content": [*images, {"type": "text", "text": question}]}]
            whole = client.chat.completions.create(model=NAME, messages=messages, max_tokens=40, temperature=0)
            parts = client.chat.completions.create(model=NAME, messages=messages, max_tokens=40, temperature=0, stream=True)
            text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
            self.assertEqual(text, whole.choices[0].message.content)
            return text

        self.each(ask)

    def test_openai_responses(self):
        client = openai.OpenAI(base_url=self.address + "/v1", api_key="none", max_retries=0)

        def ask(question, pictures):
            images = [{"type": "input_image", "image_url": f"data:image/png;base64,{data}"} for data in self.encoded(pictures)]
            content = [*images, {"type": "input_text", "text": question}]
            answer = client.responses.create(model=NAME, input=[{"role": "user", "content": content}], max_output_tokens=40, temperature=0)
            return answer.output_text

        self.each(ask)
        url = "https://example.org/a.png"
        with self.assertRaises(openai.BadRequestError):
            client.responses.create(model=NAME, input=[{"role": "user", "content": [{"type": "input_image", "image_url": url}]}])

    def test_anthropic(self):
        client = anthropic.Anthropic(base_url=self.address, api_key="none", max_retries=0)

        def ask(question, pictures):
            images = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}} for data in self.encoded(pictures)]
            messages = [{"role": "user", "content": [*images, {"type": "text", "text": question}]}]
            count = client.messages.count_tokens(model=NAME, messages=messages).input_tokens
            with client.messages.stream(model=NAME, messages=messages, max_tokens=40, extra_body={"temperature": 0}) as stream:
                text = stream.get_final_text()
                usage = stream.get_final_message().usage
            self.assertEqual(usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0), count)
            return text

        self.each(ask)

    def test_ollama(self):
        client = ollama.Client(host=self.address)
        options = {"temperature": 0, "num_predict": 40}

        def chat(question, pictures):
            # The client reads paths of files itself.
            messages = [{"role": "user", "content": question, "images": [str(path) for path in pictures]}]
            return client.chat(model=NAME, messages=messages, options=options).message.content

        def generate(question, pictures):
            images = [path.read_bytes() for path in pictures]
            return client.generate(model=NAME, prompt=question, images=images, options=options).response

        self.each(chat)
        self.each(generate)
        self.assertIn("vision", client.show(NAME).capabilities)
