"""Conversations that every template renders."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather, as "now" or <later>.',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Città, e.g. 東京"},
                "days": {"type": "integer", "default": 1, "enum": [1, 2.5, 7]},
                "units": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["city"],
        },
        "return": {"type": "string"},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "Time", "parameters": {"type": "object", "properties": {}}}}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


def call(name, arguments, id="call12345"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


HARD = "Hé 'quote' \"double\" \\back\\ <b>&amp;</b>\n\tnew line  \r\n😀 {{ not }} {% code %}"
HISTORY = [system("Be brief."), user("Hi"), assistant("Hello!"), user("And?")]
TOOL_TURN = [
    user("Weather in Rome?"),
    assistant("", tool_calls=[call("get_weather", {"city": "Rome \"è\"", "days": 2})]),
    {"role": "tool", "name": "get_weather", "tool_call_id": "call12345", "content": "{\"sky\": \"clear\"}"},
]

CONVERSATIONS = {
    "one user, prompt": {"messages": [user("Hi")], "add_generation_prompt": True},
    "one user": {"messages": [user("Hi")]},
    "system and history, prompt": {"messages": HISTORY, "add_generation_prompt": True},
    "ends with assistant": {"messages": HISTORY + [assistant("Fine.")]},
    "hard characters": {"messages": [system(HARD), user(HARD), assistant(HARD), user("  padded  ")], "add_generation_prompt": True},
    "empty texts": {"messages": [system(""), user(""), assistant(""), user("")], "add_generation_prompt": True},
    "tools offered": {"messages": [system("S"), user("Hi")], "tools": [WEATHER, CLOCK], "add_generation_prompt": True},
    "tool call and result": {"messages": TOOL_TURN, "tools": [WEATHER], "add_generation_prompt": True},
    "tool answer": {"messages": [system("S")] + TOOL_TURN + [assistant("Clear."), user("Thanks")], "tools": [CLOCK]},
    "two calls, text arguments": {
        "messages": [
            user("Both"),
            assistant(None, tool_calls=[call("get_weather", "{\"city\": \"Oslo\"}"), call("clock", "{}", "call67890")]),
            {"role": "tool", "tool_call_id": "call12345", "content": "rain"},
            {"role": "tool", "tool_call_id": "call67890", "content": "noon"},
        ],
        "tools": [WEATHER, CLOCK],
        "add_generation_prompt": True,
    },
    "thinking": {
        "messages": [
            user("1+1?"),
            assistant("<think>\nEasy.\n</think>\n\nTwo."),
            user("2+2?"),
            assistant("Four.", reasoning_content="Also easy."),
            user("3+3?"),
        ],
        "add_generation_prompt": True,
        "extra": {"enable_thinking": True, "thinking": True},
    },
    "no thinking": {"messages": [system("Sys /no_think"), user("Hi")], "add_generation_prompt": True, "extra": {"enable_thinking": False, "thinking": False}},
    "parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]}],
        "add_generation_prompt": True,
    },
    "documents": {
        "messages": [user("What does it say?")],
        "add_generation_prompt": True,
        "extra": {"documents": [{"doc_id": 1, "title": "T", "text": "It says è."}], "controls": {"length": "short"}},
    },
    "extra values": {
        "messages": [user("Hi")],
        "add_generation_prompt": True,
        "tools": [CLOCK],
        "extra": {"date_string": "1 Jan 2025", "builtin_tools": ["code_interpreter", "brave_search"], "tools_in_user_message": False, "xml_tools": ["<x/>"], "custom_instructions": "Do."},
    },
    "assistant first": {"messages": [assistant("Hi")]},
    "two users": {"messages": [user("a"), user("b")], "add_generation_prompt": True},
    "strange role": {"messages": [{"role": "wizard", "content": "Poof"}], "add_generation_prompt": True},
    "no messages": {"messages": [], "add_generation_prompt": True},
}
