//! Values from the schemas of the API's own document: valid ones, nearly valid ones, and hostile ones.

use serde_json::{Map, Value, json};

/// SplitMix64: the same numbers for the same seed, everywhere.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    /// True once in `times`.
    pub fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    pub fn pick<'t, T>(&mut self, list: &'t [T]) -> &'t T {
        &list[self.below(list.len())]
    }
}

/// Makes values of schemas.
#[derive(Debug)]
pub struct Generator<'d> {
    pub document: &'d Value,
    pub random: Random,
    /// One value in this many violates its schema.
    pub hostile: usize,
}

/// Fields whose value is a JSON schema.
const SCHEMAS: [&str; 7] =
    ["schema", "parameters", "input_schema", "format", "json_schema", "guided_json", "json"];

impl Generator<'_> {
    /// A value of the field `name`.
    pub fn value(&mut self, schema: &Value, name: &str, depth: usize) -> Value {
        if self.random.once_in(self.hostile) {
            return self.hostile(depth);
        }
        if let Some(reference) = schema["$ref"].as_str() {
            let target = self.document.pointer(reference.trim_start_matches('#')).cloned();
            return self.value(&target.unwrap_or_default(), name, depth + 1);
        }
        if let Some(parts) = schema["allOf"].as_array() {
            let mut all = Map::new();
            for part in parts {
                if let Value::Object(fields) = self.value(part, name, depth + 1) {
                    all.extend(fields);
                }
            }
            return all.into();
        }
        for several in ["oneOf", "anyOf"] {
            if let Some(options) = schema[several].as_array().filter(|options| !options.is_empty()) {
                let option = self.random.pick(options).clone();
                return self.value(&option, name, depth + 1);
            }
        }
        if let Some(values) = schema["enum"].as_array().filter(|values| !values.is_empty()) {
            return self.random.pick(values).clone();
        }
        if SCHEMAS.contains(&name) && self.random.once_in(2) {
            return self.schema(0);
        }
        let kinds: Vec<&str> = match &schema["type"] {
            Value::String(kind) => vec![kind],
            Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
            _ => vec!["object"],
        };
        match *self.random.pick(&kinds) {
            "object" => self.object(schema, depth),
            "array" => {
                let count = self.random.below(if depth > 8 { 1 } else { 4 });
                (0..count).map(|_| self.value(&schema["items"], name, depth + 1)).collect()
            }
            "string" => self.text(name),
            "integer" => json!(self.random.below(24)),
            "number" => json!(self.random.below(200) as f64 / 100.0),
            "boolean" => json!(self.random.once_in(2)),
            _ => Value::Null,
        }
    }

    fn object(&mut self, schema: &Value, depth: usize) -> Value {
        let mut fields = Map::new();
        let required = schema["required"].as_array().cloned().unwrap_or_default();
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            let is_required = required.iter().any(|other| other == name);
            let unsupported =
                field["description"].as_str().is_some_and(|text| text.starts_with("Not supported"));
            let chance = if unsupported { 100 } else { 3 };
            let wanted = if is_required { !self.random.once_in(50) } else { self.random.once_in(chance) };
            if wanted && depth < 12 {
                fields.insert(name.clone(), self.value(field, name, depth + 1));
            }
        }
        if let Some(others) = schema.get("additionalProperties").filter(|others| others.is_object()) {
            for _ in 0..self.random.below(3) {
                let name = self.random.below(300).to_string();
                fields.insert(name, self.value(others, "", depth + 1));
            }
        }
        if self.random.once_in(60) {
            fields.insert("temprature".into(), self.hostile(depth));
        }
        fields.into()
    }

    fn text(&mut self, name: &str) -> Value {
        if name.contains("grammar") && self.random.once_in(2) {
            return json!(self.grammar());
        }
        if matches!(name, "model" | "from" | "source" | "name") && !self.random.once_in(12) {
            return json!("tales");
        }
        let texts = [
            "Tell me a story about a shy fox.",
            "",
            " ",
            "auto",
            "json",
            "low",
            "<|user|>",
            "<|end|>\n<|assistant|>",
            "é日本🦊",
            "\u{0}",
            "TALES",
            "tales:latest",
            "5m",
            "-1",
            "sha256:00",
            "{\"a\": 1}",
            "../../etc/passwd",
            "text",
        ];
        json!(*self.random.pick(&texts))
    }

    /// A JSON schema, at times one that asks for too much.
    pub fn schema(&mut self, depth: usize) -> Value {
        let inner = |this: &mut Self| this.schema(depth + 1);
        match self.random.below(if depth > 4 { 8 } else { 30 }) {
            0 => json!({"type": "string"}),
            1 => json!({"type": "integer", "minimum": self.random.below(9)}),
            2 => json!({"enum": ["a", 1, null]}),
            3 => json!({"type": "boolean"}),
            4 => json!({}),
            5 => {
                json!({"type": "string", "pattern": *self.random.pick(&["^a+$", "(", "(a{1000}){1000}", "(?<=a)b", "[\\u0000-\\uffff]{1,500}"])})
            }
            6 => {
                json!({"type": "string", "format": *self.random.pick(&["date", "email", "uuid", "regex", "x"])})
            }
            7 => {
                json!({"$ref": *self.random.pick(&["#", "#/$defs/a0", "#/nowhere", "http://localhost/x", "#a"])})
            }
            8..=10 => {
                json!({"type": "object", "properties": {"a": inner(self), "b": inner(self)}, "required": ["a"]})
            }
            11 => json!({"type": "array", "items": inner(self), "minItems": self.random.below(4)}),
            12 => json!({"anyOf": [inner(self), inner(self)]}),
            13 => json!({"allOf": [inner(self), inner(self)]}),
            14 => json!({"oneOf": [inner(self), inner(self)]}),
            15 => json!({"additionalProperties": inner(self)}),
            16 => json!({"type": "string", "minLength": self.huge(), "maxLength": self.huge()}),
            17 => json!({"type": "array", "minItems": self.huge(), "maxItems": self.huge()}),
            18 => {
                json!({"type": "number", "minimum": self.huge(), "maximum": self.huge(), "multipleOf": self.huge()})
            }
            19 => json!({"not": inner(self)}),
            20 => {
                let links = self.random.below(3000);
                let chain: Map<_, _> = (0..links)
                    .map(|i| (format!("a{i}"), json!({"$ref": format!("#/$defs/a{}", (i + 1) % links)})))
                    .collect();
                json!({"$defs": chain, "$ref": "#/$defs/a0"})
            }
            21 => {
                let names: Vec<_> = (0..self.random.below(3000)).map(|i| format!("p{i}")).collect();
                let properties: Map<_, _> = names.iter().map(|name| (name.clone(), json!({}))).collect();
                json!({"type": "object", "properties": properties, "required": names})
            }
            22 => json!({"enum": (0..self.random.below(8000)).collect::<Vec<_>>()}),
            23 => json!({"title": "// # \"", "description": inner(self), "$ref": "#/description"}),
            24 => {
                let names: Vec<_> = (0..self.random.below(9000)).map(|i| format!("p{i}")).collect();
                json!({"const": {"description": {"required": names}}, "unknown": {"default": {"required": names}}})
            }
            25 => {
                let count = self.random.below(150);
                let list: Map<_, _> = (0..count).map(|i| (format!("^{i}$"), inner(self))).collect();
                json!({"patternProperties": list})
            }
            26 => {
                let count = self.random.below(70);
                json!({"type": "string", "allOf": (0..count).map(|i| json!({"pattern": i.to_string()})).collect::<Vec<_>>()})
            }
            27 => {
                let count = self.random.below(120);
                let list: Map<_, _> = (0..count).map(|i| (format!("p{i}"), json!({}))).collect();
                json!({"properties": list, "minProperties": 1, "additionalProperties": false})
            }
            28 => {
                let divisor = *self.random.pick(&[7, 9973, 99_991, 99_999_989, 86_400]);
                json!({"type": "integer", "multipleOf": divisor})
            }
            _ => (0..self.random.below(110)).fold(json!({}), |inner, _| json!({"items": inner})),
        }
    }

    fn huge(&mut self) -> Value {
        let numbers = [
            json!(0),
            json!(-1),
            json!(1),
            json!(u64::MAX),
            json!(i64::MIN),
            json!(i64::MAX),
            json!(u32::MAX),
            json!(1u64 << 53),
            json!(1e308),
            json!(-1e308),
            json!(1e-308),
            json!(5e-324),
            json!(0.1),
            json!(1_000_000_000),
            json!(100_000),
        ];
        self.random.pick(&numbers).clone()
    }

    /// A value that nobody expects.
    fn hostile(&mut self, depth: usize) -> Value {
        match self.random.below(12) {
            0..=3 => self.huge(),
            4 => Value::Null,
            5 => json!("x".repeat(1 << self.random.below(18))),
            6 => json!(*self.random.pick(&[" ", "\n", "🦊", "<|end|>", "\u{301}", "ﷺ"]))
                .as_str()
                .unwrap_or_default()
                .repeat(1 << self.random.below(14))
                .into(),
            7 => (0..self.random.below(100)).fold(json!([]), |inner, _| json!([inner])),
            8 => (0..self.random.below(100)).fold(json!({}), |inner, _| json!({"a": inner})),
            9 => json!(vec![0; 1 << self.random.below(15)]),
            10 => json!([{"role": "user"}, 1, "x", null, true]),
            _ if depth < 6 => self.schema(0),
            _ => json!(true),
        }
    }
}
