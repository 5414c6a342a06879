//! Model files whose answers are given: answer `k` of a chat is the text number `k` of a script.
//!
//! Such a file is an ordinary model of one layer, with Tales's tokenizer. All weights of the layer are 0, so a token's
//! logits follow from its embedding alone, and each token of a script has the code of its successor in the matrix of
//! the output. The chat template begins each answer with a control token that has the answer's number in the chat, and
//! that token is followed by the answer's first one.

use std::collections::HashMap;

/// The parts of a GGUF file.
pub struct Gguf<'f> {
    /// Keys with their values: type and content, as bytes.
    pub pairs: Vec<(String, Vec<u8>)>,
    tensors: usize,
    /// Descriptions of the tensors.
    infos: &'f [u8],
    data: &'f [u8],
}

/// Alignment of tensors in a file.
const ALIGNMENT: usize = 32;
/// Types of values.
const UINT32: u32 = 4;
const FLOAT32: u32 = 6;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

struct Reader<'f> {
    file: &'f [u8],
    at: usize,
}

impl<'f> Reader<'f> {
    fn number(&mut self, bytes: usize) -> usize {
        self.take(bytes).iter().rev().fold(0, |sum, byte| sum << 8 | usize::from(*byte))
    }

    fn take(&mut self, bytes: usize) -> &'f [u8] {
        self.at += bytes;
        &self.file[self.at - bytes..self.at]
    }

    fn string(&mut self) -> &'f [u8] {
        let length = self.number(8);
        self.take(length)
    }

    fn skip(&mut self, kind: usize) {
        match kind as u32 {
            STRING => drop(self.string().len()),
            ARRAY => {
                let (kind, count) = (self.number(4), self.number(8));
                (0..count).for_each(|_| self.skip(kind));
            }
            _ => self.at += [1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8][kind],
        }
    }
}

impl<'f> Gguf<'f> {
    /// Reads a file that is known to be good.
    pub fn read(file: &'f [u8]) -> Self {
        let mut reader = Reader { file, at: 8 };
        let (tensors, keys) = (reader.number(8), reader.number(8));
        let mut pairs = Vec::new();
        for _ in 0..keys {
            let key = String::from_utf8_lossy(reader.string()).into_owned();
            let start = reader.at;
            let kind = reader.number(4);
            reader.skip(kind);
            pairs.push((key, file[start..reader.at].to_vec()));
        }
        let start = reader.at;
        for _ in 0..tensors {
            reader.string();
            let dimensions = reader.number(4);
            reader.take(8 * dimensions + 4 + 8);
        }
        let infos = &file[start..reader.at];
        Self { pairs, tensors, infos, data: &file[reader.at.next_multiple_of(ALIGNMENT)..] }
    }

    /// Sets the value of a key.
    pub fn set(&mut self, key: &str, value: Vec<u8>) {
        match self.pairs.iter_mut().find(|(other, _)| other == key) {
            Some((_, old)) => *old = value,
            None => self.pairs.push((key.to_owned(), value)),
        }
    }

    pub fn write(&self) -> Vec<u8> {
        let mut file = [b"GGUF".as_slice(), &3u32.to_le_bytes()].concat();
        file.extend((self.tensors as u64).to_le_bytes());
        file.extend((self.pairs.len() as u64).to_le_bytes());
        for (key, value) in &self.pairs {
            file.extend(text(key));
            file.extend(value);
        }
        file.extend(self.infos);
        file.resize(file.len().next_multiple_of(ALIGNMENT), 0);
        file.extend(self.data);
        file
    }
}

/// A string as a value.
pub fn string(value: &str) -> Vec<u8> {
    [STRING.to_le_bytes().to_vec(), text(value)].concat()
}

fn number(value: u32) -> Vec<u8> {
    [UINT32.to_le_bytes(), value.to_le_bytes()].concat()
}

fn text(value: &str) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes(), value.as_bytes()].concat()
}

/// Adds items to an array that is a value.
fn append(value: &mut Vec<u8>, items: impl ExactSizeIterator<Item = Vec<u8>>) {
    // Type of the value, type of the items, count.
    let count = 8..16;
    let old = u64::from_le_bytes(value[count.clone()].try_into().expect("8 bytes"));
    value[count].copy_from_slice(&(old + items.len() as u64).to_le_bytes());
    value.extend(items.flatten());
}

/// Types of tokens.
const CONTROL: u32 = 3;
const USER_DEFINED: u32 = 4;

/// Length of embeddings: two heads of 64.
const HIDDEN: usize = 128;
/// Width of the feed-forward network and of K and V.
const NARROW: usize = 64;
/// Length of a piece of an answer, in characters.
const PIECE: usize = 12;
/// Tokens of prompt and answer.
const CONTEXT: u32 = 131_072;

/// Qwen's form of messages, with the number of each answer added. Without tools, every answer is the last one of the script.
const TEMPLATE: &str = "\
{%- set ns = namespace(answers=0) %}
{%- macro text(message) %}{{ message.content or '' }}{% endmacro %}
{%- if tools %}<|system|>
{% if messages[0].role == 'system' %}{{ text(messages[0]) }}

{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call one with <tool_call>
{\"name\": <name>, \"arguments\": <object>}
</tool_call><|end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|assistant|>{{ '<|answer ' ~ ns.answers ~ '|>' }}
{%- set ns.answers = ns.answers + 1 %}
{{- text(message) }}
{%- for call in message.tool_calls %}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>
{{ '{\"name\": \"' ~ call.function.name ~ '\", \"arguments\": ' }}{{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|end|>
{% elif message.role == 'tool' %}<|user|>
<tool_response>
{{ text(message) }}
</tool_response><|end|>
{% elif message.role == 'user' or not (tools and loop.first) %}{{ '<|' ~ message.role ~ '|>' }}
{{ text(message) }}<|end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% if tools %}{{ '<|answer ' ~ ns.answers ~ '|>' }}{% else %}<|answer LAST|>{% endif %}{% endif %}";

/// The tokens of a script, with what follows each.
#[derive(Default)]
struct Chain {
    /// Names, with their types.
    tokens: Vec<(String, u32)>,
    /// Successors among the tokens; `None` is the end of an answer.
    next: Vec<Option<usize>>,
}

impl Chain {
    fn new(answers: &[&str]) -> Self {
        let mut chain = Self::default();
        let mut pieces = HashMap::new();
        for (number, answer) in answers.iter().enumerate() {
            let mut last = chain.add(format!("<|answer {number}|>"), CONTROL);
            for piece in chain.split(answer, &pieces) {
                let token = chain.add(piece.clone(), USER_DEFINED);
                pieces.insert(piece, token);
                chain.next[last] = Some(token);
                last = token;
            }
        }
        chain
    }

    fn add(&mut self, name: String, kind: u32) -> usize {
        self.tokens.push((name, kind));
        self.next.push(None);
        self.tokens.len() - 1
    }

    /// Cuts an answer into pieces that no other place of the script has, as each has one successor.
    fn split(&self, answer: &str, known: &HashMap<String, usize>) -> Vec<String> {
        let mut pieces: Vec<String> = Vec::new();
        for letter in answer.chars() {
            let is_known =
                |last: &String, before: &[String]| known.contains_key(last) || before.contains(last);
            match pieces.split_last_mut() {
                Some((last, before)) if last.chars().count() < PIECE || is_known(last, before) => {
                    last.push(letter);
                }
                _ => pieces.push(letter.to_string()),
            }
        }
        // The last piece may be short and equal a piece of another answer.
        while pieces.len() > 1 && pieces.last().is_some_and(|last| last.chars().count() < PIECE) {
            let end = pieces.pop().unwrap_or_default();
            pieces.last_mut().expect("more than one").push_str(&end);
        }
        for (at, piece) in pieces.iter().enumerate() {
            assert!(
                !known.contains_key(piece) && !pieces[..at].contains(piece),
                "twice in a script: {piece}"
            );
        }
        pieces
    }
}

/// A model's file that gives these answers. `tales` is the file of Tales.
pub fn model(tales: &[u8], answers: &[&str]) -> Vec<u8> {
    model_with(tales, answers, "")
}

/// The same with `comment` in its chat template, as a sign of a family's calls.
pub fn model_with(tales: &[u8], answers: &[&str], comment: &str) -> Vec<u8> {
    let chain = Chain::new(answers);
    let mut gguf = Gguf::read(tales);
    gguf.pairs.retain(|(key, _)| key.starts_with("tokenizer."));
    let last = format!("<|answer {}|>", answers.len() - 1);
    gguf.set(
        "tokenizer.chat_template",
        string(&format!("{{# {comment} #}}{}", TEMPLATE.replace("<|answer LAST|>", &last))),
    );
    let mut vocabulary = 0;
    let mut end = 0;
    for (key, value) in &mut gguf.pairs {
        match key.as_str() {
            "tokenizer.ggml.tokens" => {
                vocabulary = u64::from_le_bytes(value[8..16].try_into().expect("8 bytes")) as usize;
                append(value, chain.tokens.iter().map(|(name, _)| text(name)));
            }
            "tokenizer.ggml.token_type" => {
                append(value, chain.tokens.iter().map(|(_, kind)| kind.to_le_bytes().to_vec()));
            }
            "tokenizer.ggml.eos_token_id" => {
                end = u32::from_le_bytes(value[4..8].try_into().expect("4 bytes")) as usize;
            }
            _ => {}
        }
    }
    let rows = vocabulary + chain.tokens.len();
    for (key, value) in [
        ("general.architecture", string("llama")),
        ("general.name", string("Scripted")),
        ("general.alignment", number(ALIGNMENT as u32)),
        ("llama.vocab_size", number(rows as u32)),
        ("llama.context_length", number(CONTEXT)),
        ("llama.embedding_length", number(HIDDEN as u32)),
        ("llama.block_count", number(1)),
        ("llama.feed_forward_length", number(NARROW as u32)),
        ("llama.attention.head_count", number(2)),
        ("llama.attention.head_count_kv", number(1)),
        ("llama.rope.dimension_count", number(NARROW as u32)),
        ("llama.attention.layer_norm_rms_epsilon", [FLOAT32.to_le_bytes(), 1e-5f32.to_le_bytes()].concat()),
    ] {
        gguf.set(key, value);
    }
    let (mut embedding, mut output) = (vec![0.0; rows * HIDDEN], vec![0.0; rows * HIDDEN]);
    for (token, next) in chain.next.iter().enumerate() {
        let next = next.map_or(end, |next| vocabulary + next);
        let start = (vocabulary + token) * HIDDEN;
        for (dimension, sign) in code(token).enumerate() {
            embedding[start + dimension] = sign;
            // Several tokens may have one successor: the end.
            output[next * HIDDEN + dimension] += sign;
        }
    }
    let zeros = |columns: usize, rows: usize| vec![0.0f32; columns * rows];
    let (infos, data) = tensors(&[
        ("token_embd.weight", &[HIDDEN, rows], embedding),
        ("output.weight", &[HIDDEN, rows], output),
        ("output_norm.weight", &[HIDDEN], vec![1.0; HIDDEN]),
        ("blk.0.attn_norm.weight", &[HIDDEN], vec![1.0; HIDDEN]),
        ("blk.0.ffn_norm.weight", &[HIDDEN], vec![1.0; HIDDEN]),
        ("blk.0.attn_q.weight", &[HIDDEN, HIDDEN], zeros(HIDDEN, HIDDEN)),
        ("blk.0.attn_k.weight", &[HIDDEN, NARROW], zeros(HIDDEN, NARROW)),
        ("blk.0.attn_v.weight", &[HIDDEN, NARROW], zeros(HIDDEN, NARROW)),
        ("blk.0.attn_output.weight", &[HIDDEN, HIDDEN], zeros(HIDDEN, HIDDEN)),
        ("blk.0.ffn_gate.weight", &[HIDDEN, NARROW], zeros(HIDDEN, NARROW)),
        ("blk.0.ffn_up.weight", &[HIDDEN, NARROW], zeros(HIDDEN, NARROW)),
        ("blk.0.ffn_down.weight", &[NARROW, HIDDEN], zeros(NARROW, HIDDEN)),
    ]);
    Gguf { tensors: 12, infos: &infos, data: &data, ..gguf }.write()
}

/// Descriptions and contents of tensors in f32.
fn tensors(list: &[(&str, &[usize], Vec<f32>)]) -> (Vec<u8>, Vec<u8>) {
    let (mut infos, mut data) = (Vec::new(), Vec::new());
    for (name, shape, values) in list {
        infos.extend(text(name));
        infos.extend((shape.len() as u32).to_le_bytes());
        shape.iter().for_each(|&dimension| infos.extend((dimension as u64).to_le_bytes()));
        infos.extend(0u32.to_le_bytes());
        infos.extend((data.len() as u64).to_le_bytes());
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        data.resize(data.len().next_multiple_of(ALIGNMENT), 0);
    }
    (infos, data)
}

/// Signs that stand for a token: those of different tokens are nearly orthogonal.
fn code(token: usize) -> impl Iterator<Item = f32> {
    let mut state = token as u64 + 1;
    (0..HIDDEN).map(move |_| {
        // splitmix64
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        if (mixed ^ (mixed >> 31)) & 1 == 0 { 1.0 } else { -1.0 }
    })
}
