#!/usr/bin/env python3
"""Writes expected.json: what Python's jinja2 makes of chat templates, with the settings of Hugging Face's
apply_chat_template (transformers/utils/chat_template_utils.py).

    python3 expected.py [FOLDER_OF_TEMPLATES [OUTPUT]]

Needs jinja2 3.1. The folder is the shared one beside the checkout unless given. The templates themselves stay where
they are: the output has their names, a hash of each, and the rendered texts.
"""

import datetime
import hashlib
import json
import pathlib
import sys

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

sys.dont_write_bytecode = True

import conversations
import synthetic

HERE = pathlib.Path(__file__).parent
NOW = datetime.datetime(2024, 7, 6, 13, 5, 9)
TOKENS = {"bos_token": "<BOS>", "eos_token": "<EOS>", "pad_token": "<PAD>", "unk_token": "<UNK>"}


class Generation(Extension):
    """{% generation %} marks what the assistant says; it renders as if it were not there."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller):
        return caller()


class Raised(jinja2.exceptions.TemplateError):
    """By the template itself."""


def raise_exception(message):
    raise Raised(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda format: NOW.strftime(format)
    return env


def render(source, conversation):
    try:
        template = environment().from_string(source)
        return template.render(
            messages=conversation["messages"],
            tools=conversation.get("tools"),
            documents=conversation.get("extra", {}).get("documents"),
            add_generation_prompt=conversation.get("add_generation_prompt", False),
            **TOKENS,
            **{k: v for k, v in conversation.get("extra", {}).items() if k != "documents"},
        )
    except Raised as error:
        return {"raises": str(error)}
    except Exception as error:  # Whatever jinja2 and Python refuse: undefined attributes, types, security.
        return {"error": f"{type(error).__name__}: {error}"}


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "../../../../../shared/templates"
    output = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else HERE / "expected.json"
    cases = conversations.CONVERSATIONS
    templates = {}
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        texts = {name: render(source, conversation) for name, conversation in cases.items()}
        templates[path.name] = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "texts": texts}
    features = [
        {"source": source, "conversation": name, "text": render(source, cases[name])}
        for source, name in synthetic.templates()
    ]
    result = {"tokens": TOKENS, "conversations": cases, "templates": templates, "synthetic": features}
    output.write_text(json.dumps(result, ensure_ascii=False, indent=0), encoding="utf-8")
    print(f"{output}: {len(templates)} templates, {len(features)} synthetic, {output.stat().st_size} bytes")


main()
