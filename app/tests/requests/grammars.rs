//! Requests with one grammar: valid, hostile and nearly valid ones of all kinds, in all fields that take them.

use serde_json::{Value, json};

use super::generator::Generator;

/// Texts that lexers of grammars confuse.
const PIECES: [&str; 40] = [
    "\"a\"",
    "\"#\"",
    "\"//\"",
    "\"\\\"\"",
    "\"",
    "/b/",
    "/#\"/",
    "/\\//i",
    "/",
    "//",
    "# it's 5\" long\n",
    "# \"\n",
    "// \"\n",
    "<[1-9]>",
    "<[^5]>",
    "<|end|>",
    "<\">",
    "@lark_grammar",
    "@g",
    "%json {\"$comment\": \"//\"}",
    "%json",
    "%json {",
    "%regex {\"substring_chars\": \"#\"}",
    "%lark { start: \"b\" # }\n }",
    "%lark {",
    "%ignore / /\n",
    "%import common.INT\n",
    "%llguidance {}\n",
    "\n",
    "\n| ",
    "start",
    "a",
    "B",
    "~/c/",
    "(",
    ")",
    "[a]",
    "{2,3}",
    "a::_",
    "\u{1f98a}",
];

/// Parts of a rule or an expression, each with its operator.
const OPERATORS: [&str; 8] = ["", "", "", "?", "*", "+", "{1,3}", "{2,1000000}"];

impl Generator<'_> {
    /// Returns the path and the body of a request with a grammar.
    pub fn constrained(&mut self) -> (String, Value) {
        let messages = json!([{"role": "user", "content": "Hi"}]);
        let tokens = 1 + self.random.below(3);
        let chat = json!({"model": "tales", "messages": messages, "max_tokens": tokens});
        let text = json!({"model": "tales", "prompt": "Hi", "max_tokens": tokens});
        let schema = self.schema(0);
        let function = json!({"name": "f", "parameters": schema, "strict": !self.random.once_in(3)});
        let format =
            json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": true}});
        let fields = match self.random.below(14) {
            0 | 1 => json!({"grammar": self.grammar()}),
            2 | 3 => json!({"guided_grammar": self.grammar()}),
            4 => json!({"structured_outputs": {"grammar": self.grammar()}}),
            5 => json!({"guided_regex": self.regex()}),
            6 => json!({"structured_outputs": {"regex": self.regex()}}),
            7 => json!({"guided_json": schema}),
            8 => json!({"structured_outputs": {"json": schema}}),
            9 | 10 => json!({"response_format": format}),
            11 => {
                let options = json!({"num_predict": tokens});
                let (path, body) = match self.random.once_in(2) {
                    true => ("/api/chat", json!({"messages": messages})),
                    false => ("/api/generate", json!({"prompt": "Hi"})),
                };
                let body = join(body, json!({"model": "tales", "format": schema, "options": options}));
                return (path.into(), body);
            }
            12 => {
                let tool = json!({"name": "f", "input_schema": schema});
                let body = join(chat, json!({"tools": [tool], "tool_choice": {"type": "any"}}));
                return ("/v1/messages".into(), body);
            }
            _ => {
                let tools = json!([{"type": "function", "function": function}]);
                let body = join(chat, json!({"tools": tools, "tool_choice": "required"}));
                return ("/v1/chat/completions".into(), body);
            }
        };
        match self.random.below(3) {
            0 => ("/v1/completions".into(), join(text, fields)),
            _ => ("/v1/chat/completions".into(), join(chat, fields)),
        }
    }

    /// A grammar in Lark or GBNF.
    pub fn grammar(&mut self) -> String {
        match self.random.below(5) {
            0 => self.gbnf(),
            1 => self.large_lark(),
            2 => self.pieces(),
            _ => self.lark(0),
        }
    }

    /// Pieces of a grammar in any order.
    fn pieces(&mut self) -> String {
        let mut text =
            String::from(*self.random.pick(&["start: ", "", "# \"\nstart: ", "start: a\na: \"b\"\n"]));
        for _ in 0..self.random.below(30) {
            text += *self.random.pick(&PIECES);
            text += *self.random.pick(&["", " ", "\n", " | "]);
        }
        text
    }

    /// A Lark grammar that is nearly always valid.
    fn lark(&mut self, depth: usize) -> String {
        let rules = 1 + self.random.below(5);
        let mut text = String::from("start: r0\n");
        for rule in 0..rules {
            let attribute = match self.random.below(12) {
                0 => "[temperature=0.5]",
                1 => "[stop=\"x\"]",
                2 => "[suffix=/x/]",
                3 => "[capture, max_tokens=2]",
                _ => "",
            };
            text += &format!("r{rule}{attribute}:");
            for _ in 0..1 + self.random.below(4) {
                let value = self.value_of_lark(rules, depth);
                let open = self.random.once_in(4);
                text += &if open { format!(" ({value} | \"x\")") } else { format!(" {value}") };
                text += *self.random.pick(&OPERATORS);
                text += *self.random.pick(&["", "", " |", "\n  |", " # it's 5\" long\n  |", " // \"\n  |"]);
            }
            text += *self.random.pick(&[" \"y\"\n", " \"y\" # \"\n", " \"y\" // /\n"]);
        }
        text += "T: /[a-z]+/ & ~/abc/ | \"T#\" U~1..2\nU: \"u\"i\n";
        text + *self.random.pick(&["", "%ignore / +/", "%import common.INT", "# \""])
    }

    fn value_of_lark(&mut self, rules: usize, depth: usize) -> String {
        match self.random.below(12) {
            0 | 1 => format!("r{}", self.random.below(rules + 1)),
            2 => "T".into(),
            3 => "\"it's \\\"#//\"".into(),
            4 => format!("/{}/", self.regex().replace('/', "\\/").replace('\n', " ")),
            5 | 6 => format!("%json {}", self.schema(0)),
            7 => "<[3-40]>".into(),
            8 => "<|end|>".into(),
            9 if depth < 3 => format!("%lark {{\n{}\n}}", self.lark(depth + 1)),
            10 => "%regex {\"substring_words\": \"a // b # \\\" c\"}".into(),
            _ => "\"a\"".into(),
        }
    }

    /// A Lark grammar that is large in one way.
    fn large_lark(&mut self) -> String {
        let count = [90, 900, 1_100, 2_100, 5_100, 40_000][self.random.below(6)];
        let list = |item: &dyn Fn(usize) -> String, between: &str| -> String {
            (0..count).map(item).collect::<Vec<_>>().join(between)
        };
        let hidden = *self.random.pick(&["", "# \"\n", "x: /\"/ // '\"\n", "x: <\"> # it's 5\" long\n"]);
        let grammar = match self.random.below(16) {
            0 => format!("start: {}", list(&|_| "\"a\"".into(), "|")),
            1 => format!("start: {}", list(&|i| format!("\"{i}\""), "|")),
            2 => format!("start: T\nT: {}", list(&|i| format!("\"{i}\""), "|")),
            3 => format!("start: {}\na: \"a\"", list(&|_| "a?".into(), " ")),
            4 => format!("start: T\nT: {}\nA: /[a-f]/", list(&|_| "A*".into(), " ")),
            5 => format!(
                "start: r0\n{}\nr{count}: \"b\"",
                list(&|i| format!("r{i}: (\"a\" r{})?", i + 1), "\n")
            ),
            6 => {
                format!("start: T0\n{}\nT{count}: \"b\"", list(&|i| format!("T{i}: \"a\" T{}", i + 1), "\n"))
            }
            7 => {
                format!("start: T0\n{}\nT{count}: \"b\"", list(&|i| format!("T{i}: T{0} T{0}", i + 1), "\n"))
            }
            8 => format!("start: {}\"a\"{}", "(".repeat(count), ")".repeat(count)),
            9 => format!("start: {}", "a{".repeat(count)),
            10 => format!("start: {}\"a\"{}", "%lark { start: ".repeat(count), "}".repeat(count)),
            11 => {
                let links = list(&|i| format!("\"a{i}\":{{\"$ref\":\"#/$defs/a{}\"}}", i + 1), ",");
                format!("start: %json {{\"$comment\":\"//\",\"$defs\":{{{links}}},\"$ref\":\"#/$defs/a0\"}}")
            }
            12 => format!(
                "start: %json {{\"$comment\":\"//\",\"required\":[{}]}}",
                list(&|i| format!("\"{i}\""), ",")
            ),
            13 => format!("start: T\nT: {}", list(&|i| format!("~/.*{i}.*/"), " & ")),
            14 => format!("start: %json {}1{}", "[".repeat(count), "]".repeat(count)),
            _ => format!("start: {}", list(&|i| format!("/[a-z ]*c[a-z ]{{{i}}}/"), "|")),
        };
        format!("{hidden}{grammar}\n")
    }

    fn gbnf(&mut self) -> String {
        let count = [9, 90, 1_100, 5_100][self.random.below(4)];
        let list = |item: &dyn Fn(usize) -> String, between: &str| -> String {
            (0..count).map(item).collect::<Vec<_>>().join(between)
        };
        let hidden = *self.random.pick(&["", "# \"\n", "# %json {\n"]);
        let grammar = match self.random.below(9) {
            0 => format!("root ::= {}\nx ::= \"a\"", list(&|_| "x?".into(), " ")),
            1 => format!("root ::= {}", list(&|i| format!("\"{i}\""), " | ")),
            2 => format!(
                "root ::= r0\n{}\nr{count} ::= \"b\"",
                list(&|i| format!("r{i} ::= [ab]* r{}", i + 1), "\n")
            ),
            3 => format!("root ::= {}\"a\"{}", "(".repeat(count), "){1,9}".repeat(count)),
            4 => "root ::= s\ns ::= w | s s | s s s\nw ::= [a-zA-Z,. ]".into(),
            5 => "root ::= \"{\" [^\"#/]* \"}\" # it's 5\" long\n".into(),
            6 => "root ::= root | a\na ::= root a".into(),
            7 => "root ::= <[3]> !<[4]> ([a-z] | \"\\\"\" ){2,3} .*".into(),
            _ => {
                format!("root ::= {}", list(&|i| format!("[a-{}]*", char::from(b'b' + (i % 20) as u8)), " "))
            }
        };
        format!("{hidden}{grammar}")
    }

    fn regex(&mut self) -> String {
        let count = [3, 40, 490, 900, 1_100, 9_000][self.random.below(6)];
        match self.random.below(16) {
            0 => "[a-y]?".repeat(count),
            1 => "[ab]*".repeat(count),
            2 => (0..count).map(|i| format!(".*{i}.*|")).collect(),
            3 => format!("{}a{}", "(".repeat(count), ")*".repeat(count)),
            4 => r"\p{L}".repeat(count),
            5 => r"(?i:[\p{L}])".repeat(count),
            6 => format!("(a{{{count}}}){{{count}}}"),
            7 => (0..count).map(|i| format!("[a-z ]*c[a-z ]{{{i}}}|")).collect(),
            8 => "x".repeat(count * 40),
            9 => {
                let odd = ["", "(", "a\\", "[", "\\/\"#", "(?<=a)b", "\n\"", "//", "a/\nx: %json {} #"];
                (*self.random.pick(&odd)).into()
            }
            _ => "it's|5\" long|[^/\"#]{1,9}".into(),
        }
    }
}

fn join(mut body: Value, more: Value) -> Value {
    if let (Value::Object(body), Value::Object(more)) = (&mut body, more) {
        body.extend(more);
    }
    body
}
